"""torchrun and DeepSpeed's launcher, whose processes are forks: nothing is imported again."""

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback

CLONE_NEWNET = 0x40000000  # of setns: a network namespace
PR_SET_PDEATHSIG = 1  # of prctl
OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH")


class Forked(subprocess.Popen):
    """`python ...` as a fork of this process, which has imported what it needs: what launchers
    start."""

    def _execute_child(
        self, args, *options
    ):  # executable, preexec, close_fds, pass_fds, cwd, env, ...
        self.pid, self._child_created = os.fork(), True
        if self.pid:
            return
        if options[-2]:  # start_new_session
            os.setsid()
        # Else it would outlive its launcher, if that is killed, as in life
        if "ORPHANS" not in os.environ:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.environ.clear()
        os.environ.update(options[5])
        sys.argv = [word for word in args[1:] if word != "-u"]
        if "RANK" in os.environ and os.environ["RANK"] == os.environ.get("SLOW_RANK"):
            time.sleep(2)
        code = 1
        try:
            if sys.argv[0] == "-m":
                del sys.argv[0]
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(sys.argv[0], run_name="__main__")
            code = 0
        except SystemExit as ended:
            code = ended.code
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(int(code or 0))


def launch(launcher, arguments, namespace=""):
    """As the command `torchrun` or `deepspeed`."""
    from deepspeed.launcher import runner
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    for name in OF_A_RANK:
        os.environ.pop(name, None)
    if namespace:
        with open(f"/var/run/netns/{namespace}") as file:
            assert ctypes.CDLL(None).setns(file.fileno(), CLONE_NEWNET) == 0
    subprocess.Popen = subprocess_handler.Popen = Forked
    (torchrun if launcher == "torchrun" else runner).main(arguments)
