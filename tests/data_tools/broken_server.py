"""A proxy for an object store that counts requests and breaks some of them."""

import re
import threading
import time
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

from tests.waiting import HANG_S, until

STALL_S = 1.4
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


@dataclass
class Server:
    """moto's application as WSGI, with faults."""

    app: Any
    url: str = ""
    log: list = field(default_factory=list)  # method, path, signed
    faults: list = field(default_factory=list)
    now: int = 0
    most: int = 0  # requests at work at the same time
    together: str = ""  # requests for such a path wait until three are at work
    lock: threading.Condition = field(default_factory=threading.Condition)

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
