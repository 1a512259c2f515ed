"""Commands as a user types them."""

from omnilead.__main__ import main


class Shell:
    def __init__(self, capsys):
        self.capsys = capsys

    def run(self, *words, code=0):
        """`omnilead` with these words. -> its output and its errors."""
        try:
            ended = main([str(word) for word in words])
        except SystemExit as stop:
            ended = int(stop.code or 0)
        out, err = self.capsys.readouterr()
        assert ended == code, err
        return out, err

    def shard(self, archive, out, *options, code=0):
        """In one process. -> what it says beside its output."""
        return self.run("shard", archive, "--out", out, "--workers", 1, *options, code=code)[1]

    def verify(self, dataset, archive, *options, code=0):
        words = ("verify", dataset, "--archive", archive, "--workers", 1)
        return self.run(*words, *options, code=code)[1]

    def error(self, *words):
        """The one line that says what is wrong with a command."""
        out, err = self.run(*words, code=2)
        (line,) = [line for line in err.splitlines() if not line.startswith("note: ")]
        assert not out
        return line
