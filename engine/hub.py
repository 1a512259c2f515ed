"""Share a model on the Hugging Face Hub, or fetch one.

    omnilead hub push RUN org/name --private --licence cc-by-4.0     RUN/model: weights, settings, model card
    omnilead hub pull org/name OUT                                   the same; org/name@v1 for a branch, tag or commit

Only the files of the model folder are uploaded, after their checksums were verified: no data, no logs, no checkpoints; paths on
this machine are reduced to file names. `hf auth login`, or HF_TOKEN in the environment, says who you are. In Python:
engine.load("hf://org/name"). Needs `pip install 'omnilead[hub]'`.
"""

import argparse
import hashlib
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from engine.common import ConfigError, Parser, interruptible

if __name__ == "__main__":
    interruptible("engine.hub")

from engine.model.folder import (
    CARD,
    CONFIG,
    PREPROCESSING,
    SHA256,
    WEIGHTS,
    document_of,
    front_matter,
    huggingface,
    model_folder,
    sealed,
)

# An absolute path or an address of a bucket; not https:// or hf://
PLACE = re.compile(r"(?<![\w/:.])(?:(?:s3|gs|file)://|~?/|[A-Za-z]:\\)[\w.+-]+(?:[/\\][\w.+-]+)+")


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    try:
        if args.action == "push":
            print(push(args.model, args.repo, args.private, args.licence))
        else:
            pull(args.repo, args.out)
            print(f"{args.out}: a model: engine.load({str(args.out)!r})")
        return 0
    except (ConfigError, OSError) as error:
        message, code = str(error), 2
    except KeyboardInterrupt:
        message, code = "interrupted: run the same command again", 130
    print(f"omnilead hub: {' '.join(message.split())}", file=sys.stderr)
    return code


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m engine.hub", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="action", required=True, metavar="push|pull")
    example = "example: omnilead hub push RUN org/name --private"
    upload = commands.add_parser("push", help="upload RUN/model", description="Upload RUN/model.", epilog=example)
    upload.add_argument("model", metavar="RUN", help="a run, or a model folder")
    upload.add_argument("repo", metavar="org/name", help="repository on the Hub; made if it does not exist")
    upload.add_argument("--private", action="store_true", help="if it is made now: only you and your organisation see it")
    upload.add_argument("--licence", metavar="ID", help="of the weights, for the model card: mit, cc-by-4.0, ...")
    example = "example: omnilead hub pull org/name OUT"
    fetch = commands.add_parser("pull", help="download a model", description="Download a model.", epilog=example)
    fetch.add_argument("repo", metavar="org/name", help="repository on the Hub, or org/name@revision")
    fetch.add_argument("out", metavar="OUT", type=Path, help="a new or empty folder")
    return parser.parse_args(arguments)


def push(model: str | Path, repo: str, private: bool = False, licence: str | None = None) -> str:
    """Uploads RUN/model in one commit. -> its address"""
    with model_folder(model) as (folder, _), huggingface(repo) as hub:
        files = published(folder, licence)
        hub.create_repo(repo, private=private, exist_ok=True)
        operations = [hub.CommitOperationAdd(name, content) for name, content in files.items()]
        commit = hub.create_commit(repo, operations, commit_message="A model of omnilead")
    return str(commit.repo_url)


def published(folder: Path, licence: str | None = None) -> dict[str, Path | bytes]:
    """What is uploaded, by file name: the files that config.json names, the model card, and config.json for these."""
    document: dict[str, Any] = without_places(document_of(folder / CONFIG))
    sums = document.pop(SHA256, None) or {WEIGHTS: "", PREPROCESSING: ""}
    files: dict[str, Path | bytes] = {name: folder / name for name in sums if name not in (CONFIG, CARD)}
    card = (folder / CARD).read_text() if (folder / CARD).is_file() else f"# {folder.resolve().parent.name}\n"
    files[CARD] = front_matter({"license": licence} if licence else {}, without_places(card)).encode()
    digests = {name: hashlib.sha256(c if isinstance(c, bytes) else c.read_bytes()).hexdigest() for name, c in files.items()}
    return files | {CONFIG: sealed(document, digests).encode()}


def without_places(value: Any) -> Any:
    """Paths and buckets' addresses in texts, at any depth, reduced to the last name."""
    if isinstance(value, dict):
        return {key: without_places(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_places(inner) for inner in value]
    return PLACE.sub(lambda place: re.split(r"[/\\]", place[0])[-1], value) if isinstance(value, str) else value


def pull(repo: str, out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: exists and is not an empty folder: choose another name")
    with model_folder(f"hf://{repo}") as (folder, _):
        shutil.copytree(folder, out, dirs_exist_ok=True)


if __name__ == "__main__":
    sys.exit(main())
