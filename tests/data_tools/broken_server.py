"""An object store on loopback: moto behind a real HTTP server, which counts requests and breaks some of them."""

import logging
import os
import re
import threading
import time
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

import pytest

from omnilead.data_tools.io import storage
from tests.waiting import HANG_S, until

s3fs = pytest.importorskip("s3fs")
moto = pytest.importorskip("moto.server")
serving = pytest.importorskip("werkzeug.serving")

# Credentials of the store, and none of the machine's
KEYS = {
    "ACCESS_KEY_ID": "key",
    "SECRET_ACCESS_KEY": "secret",
    "DEFAULT_REGION": "us-east-1",
    "CONFIG_FILE": os.devnull,
    "SHARED_CREDENTIALS_FILE": os.devnull,
    "EC2_METADATA_DISABLED": "true",
    "MAX_ATTEMPTS": "1",  # botocore's own: ours are tested
}
# Clients wait half as long. A busy machine may answer after a second: a write that is sent again then
# arrives twice, perhaps after the object was removed.
STALL_S = 5.0
ERRORS = {
    "404": (
        "404 Not Found",
        b"<Error><Code>NoSuchKey</Code><Message>The specified key does not "
        b"exist.</Message></Error>",
    )
}
ERROR_500 = (
    "500 Internal Server Error",
    b"<Error><Code>InternalError</Code><Message>try again</Message></Error>",
)


@dataclass
class Fault:
    """`times` requests of this method, for a path that matches, end `how` they should not."""

    # 500, 404, stall, drop, cut (fewer bytes than announced), lie (fewer bytes, and announced so),
    # kill (the client)
    how: str
    method: str
    path: str
    times: float = 1
    victim: Any = None  # a process


def forget_connections():
    storage._connect.cache_clear()
    s3fs.S3FileSystem.clear_instance_cache()


def new_app():
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    return moto.DomainDispatcherApplication(moto.create_backend_app)


@dataclass
class Server:
    """moto's application as WSGI, with faults."""

    app: Any = field(default_factory=new_app)
    http: Any = None
    log: list = field(default_factory=list)  # method, path, signed
    faults: list = field(default_factory=list)
    now: int = 0
    most: int = 0  # requests at work at the same time
    together: str = ""  # requests for such a path wait until three are at work
    lock: threading.Condition = field(default_factory=threading.Condition)

    def start(self, patch):
        """`patch`: of the environment, in which the store's address and keys are then."""
        self.http = serving.make_server("127.0.0.1", 0, self, threaded=True)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{self.http.server_port}")
        for name, value in KEYS.items():
            patch.setenv(f"AWS_{name}", value)
        forget_connections()

    def stop(self):
        self.http.shutdown()
        self.http.server_close()
        forget_connections()

    def __call__(self, environ, start_response):
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self.lock.notify_all()
            if self.together and re.search(self.together, environ["PATH_INFO"]):
                self.lock.wait_for(lambda: self.most >= 3, HANG_S)
        try:
            return self.answer(environ, start_response)
        finally:
            with self.lock:
                self.now -= 1

    def answer(self, environ, start_response):
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        with self.lock:
            self.log.append((method, path, "HTTP_AUTHORIZATION" in environ))
            fault = next(
                (
                    f
                    for f in self.faults
                    if f.times and f.method == method and re.search(f.path, path)
                ),
                None,
            )
            if fault:
                fault.times -= 1
        if not fault:
            return self.app(environ, start_response)
        if fault.how in ("500", "404", "stall", "kill"):
            if fault.how == "kill":
                until(lambda: fault.victim)
                fault.victim.kill()
                connection.wait([fault.victim.sentinel])
            time.sleep(STALL_S if fault.how == "stall" else 0)
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            status, body = ERRORS.get(fault.how, ERROR_500)
            start_response(status, [("Content-Length", str(len(body)))])
            return [body]
        if fault.how == "drop":
            environ["werkzeug.socket"].shutdown(2)
            raise ConnectionResetError
        head = []
        body = b"".join(self.app(environ, lambda *given: head.extend(given)))
        half = body[: len(body) // 2]
        headers = [
            (k, str(len(half)) if k.lower() == "content-length" and fault.how == "lie" else v)
            for k, v in head[1]
        ]
        start_response(head[0], [(k, v) for k, v in headers if "checksum" not in k.lower()])
        return [half]

    def count(self, method, path):
        return sum(m == method and bool(re.search(path, p)) for m, p, _ in self.log)
