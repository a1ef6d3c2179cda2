"""What is made in the background in a run of the whole suite, and where it is asked for else."""

from concurrent.futures import Future


class Background:
    """`begin` of a test file, for the fixture `background` of conftest.py."""

    def __init__(self, make):
        self.make, self.future = make, None

    def __call__(self, folder):
        """The job that makes it in this folder."""
        self.future = Future()

        def job():
            try:
                self.future.set_result(self.make(folder))
            except BaseException as error:
                self.future.set_exception(error)

        return job

    def result(self, tmp_path_factory):
        if self.future is None:
            self(tmp_path_factory.mktemp("made"))()
        return self.future.result()
