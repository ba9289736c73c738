"""Imports NeMo Gym once and forks a child per server. Runs in NeMo Gym's own interpreter, imports nothing of ours.

    <runtime python> forkserver.py CONTROL_FD

Orders come in and events go out on the control socket, one JSON object a line:

    {"op": "parse", "id": 1, "log": path, "out": path, "directory": path, "config_paths": [...],
     "initial": {...}, "overrides": [[dotted key, value], ...]}
    {"op": "serve", "id": 2, "log": path, "directory": path, "entrypoint": "app.py", "instance": name,
     "config": {...}, "ray": false}
    {"op": "ray",   "id": 3, "log": path, "out": path}
    {"op": "kill",  "pid": 123, "signal": 2, "group": false}
    <- {"event": "ready", "threads": 1}  {"event": "started", "id": 1, "pid": 123}
       {"event": "exited", "pid": 123, "status": 0}           status as of subprocess: -9 for SIGKILL

When the control socket ends, everything that was started here is killed, helpers of servers included.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import select
import signal
import socket
import sys
import time
import traceback
import types
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SERVER_TAG = "GYMGATE_SERVER"
DEFERRED = ("pandas", "scipy", "wandb", "ray", "mlflow")
"""Packages that NeMo Gym's base modules import for reports and clusters: a second and 150 MB that no server
needs to answer. A server that imports one itself gets it as usual."""
ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
INSTANCE_KINDS = ("resources_servers", "responses_api_agents", "responses_api_models", "environment_servers")
NOWHERE = "http://127.0.0.1:1/v1"
DEFAULT_MODEL = "responses_api_models/openai_model/configs/openai_model.yaml"
STAND_IN_MODEL = {
    "entrypoint": "app.py",
    "openai_base_url": "http://127.0.0.1:1/v1",
    "openai_api_key": "gymgate",
    "openai_model": "model",
}
ROLLOUT_KEY = re.compile(r"\b[0-9a-f]{32}\b")

libc = ctypes.CDLL(None, use_errno=True)


class Deferred:
    """A name of a package that is imported when the name is first used."""

    def __init__(self, module: str, name: str = "") -> None:
        self._target = (module, name)

    def _real(self) -> Any:
        module, name = self._target
        value = importlib.import_module(module)
        return getattr(value, name) if name else value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._real()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._real(), name)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._real())

    def __or__(self, other: Any) -> Any:
        return Any

    __ror__ = __or__


class DeferredModule(types.ModuleType):
    """Stands for a package while NeMo Gym is imported."""

    __path__ = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return importlib.metadata.version(self.__name__)
        if name.startswith("__"):
            raise AttributeError(name)
        return Deferred(self.__name__, name)


class DeferringFinder:
    """Finds every module of the deferred packages, and makes it empty."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in DEFERRED:
            return importlib.util.spec_from_loader(name, self)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return DeferredModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def preload() -> None:
    """Import what every server needs, on one thread."""
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
    finder = DeferringFinder()
    sys.meta_path.insert(0, finder)
    try:
        for name in ("base_resources_server", "base_responses_api_agent", "server_utils", "global_config"):
            importlib.import_module(f"nemo_gym.{name}")
        for name in ("uvicorn", "fastapi", "uvloop", "httptools", "runpy"):
            if importlib.util.find_spec(name) is not None:
                importlib.import_module(name)
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in DEFERRED]:
            del sys.modules[name]
    for name in ONE_THREAD:  # a server that computes may use its cores
        del os.environ[name]


def prctl(option: int, value: int) -> None:
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def serve(order: dict[str, Any]) -> None:
    """Become a NeMo Gym server; returns when it has shut down."""
    import runpy

    server_utils: Any = importlib.import_module("nemo_gym.server_utils")
    OmegaConf: Any = importlib.import_module("omegaconf").OmegaConf

    directory = order["directory"]
    os.chdir(directory)
    os.environ["NEMO_GYM_CONFIG_DICT"] = OmegaConf.to_yaml(OmegaConf.create(order["config"]))
    os.environ["NEMO_GYM_CONFIG_PATH"] = order["instance"]
    os.environ["PYTHONPATH"] = directory
    sys.path.insert(0, directory)
    sys.argv = [order["entrypoint"]]
    if not order["ray"]:
        server_utils.initialize_ray = lambda: print("Ray is not started: this server does not use it")
    if "multiprocessing.process" in sys.modules:  # where spawned workers look for the entrypoint
        sys.modules["multiprocessing.process"].ORIGINAL_DIR = directory  # type: ignore[attr-defined]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    for stream in (sys.stdout, sys.stderr):
        keep_out_keys(stream)
    runpy.run_path(os.path.join(directory, order["entrypoint"]), run_name="__main__")  # noqa: PTH118


def keep_out_keys(stream: Any) -> None:
    """Leave rollouts' keys, which Gym's messages show, out of what is written to a log."""
    write = stream.write

    def write_without(text: str) -> Any:
        return write(ROLLOUT_KEY.sub("<key>", text))

    stream.write = write_without


def parse(order: dict[str, Any]) -> None:
    """Resolve an environment's config with NeMo Gym's own parser and write it to `out`."""
    os.chdir(order["directory"])  # which the config's relative paths are tried against
    Path(order["out"]).write_text(json.dumps(parsed(order)))


def parsed(order: dict[str, Any]) -> dict[str, Any]:
    """`{"config": {...}, "urls": [...]}`, or `{"missing": [keys that the user must give]}`, or `{"error": message}`.

    `urls` are the placeholders for a model's URL that a server uses by itself, outside of a model server's block.
    """
    gym: Any = importlib.import_module("nemo_gym.global_config")
    OmegaConf: Any = importlib.import_module("omegaconf").OmegaConf
    parser = gym.GlobalConfigDictParser()
    initial = OmegaConf.create(order["initial"])
    for key, value in order["overrides"]:
        OmegaConf.update(initial, key, value, force_add=True)
    paths = order["config_paths"]
    try:
        merged = OmegaConf.merge(*parser.load_extra_config_paths(list(paths))[1], initial)
        if "policy_model" not in merged:
            paths = [*paths, DEFAULT_MODEL]
            merged = OmegaConf.merge(*parser.load_extra_config_paths(list(paths))[1], initial)
        plain = OmegaConf.to_container(merged, resolve=False)
        for name in undefined_models(plain):
            initial[name] = {"responses_api_models": {"openai_model": dict(STAND_IN_MODEL)}}
        wanted = unset(plain)
        for key, value in wanted["models"].items():
            OmegaConf.update(initial, key, value, force_add=True)
        if wanted["others"]:
            return {"missing": wanted["others"]}
        initial.config_paths = paths
        try:
            config = gyms_parse(gym, initial)
        except Exception as error:
            if type(error).__name__ != "AlmostServerError":
                raise
            traceback.print_exc()  # once more without datasets, which are ours to read and need not be valid
            for key in dataset_lists(plain):
                OmegaConf.update(initial, key, [], force_add=True)
            config = gyms_parse(gym, initial)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    resolved = OmegaConf.to_container(config, resolve=False)
    return {"config": resolved, "urls": direct_urls(resolved)}


def unset(merged: dict[str, Any]) -> dict[str, Any]:
    """Keys that are interpolated but not set: those of model servers, which the gateway stands in for, get a
    placeholder; the others are the user's to give."""
    models: dict[str, str] = {}
    others: set[str] = set()
    for name, block in merged.items():
        if not isinstance(block, dict):
            continue
        for kind in INSTANCE_KINDS:
            names = {key for key in interpolated(block.get(kind)) if key not in merged}
            if kind == "responses_api_models":
                models.update({key: placeholder(key) for key in names})
                models.update({f"{name}.{path}": placeholder(path) for path in blanks(block, kind)})
            else:
                others.update(names)
    return {"models": models, "others": sorted(others - set(models))}


def gyms_parse(gym: Any, initial: Any) -> Any:
    """What Gym's parser makes of an initial config."""
    return gym.GlobalConfigDictParser().parse(
        gym.GlobalConfigDictParserConfig(
            initial_global_config_dict=initial, skip_load_from_cli=True, skip_load_from_dotenv=True
        )
    )


def dataset_lists(merged: dict[str, Any]) -> list[str]:
    """Dotted paths of the datasets that agents declare."""
    return [
        f"{name}.responses_api_agents.{type_}.datasets"
        for name, block in merged.items()
        if isinstance(block, dict)
        for type_, settings in (block.get("responses_api_agents") or {}).items()
        if isinstance(settings, dict) and "datasets" in settings
    ]


def undefined_models(merged: dict[str, Any]) -> list[str]:
    """Model servers that servers refer to and no file defines: the gateway stands in for them like for any other."""
    return sorted({name for name in model_references(merged) if name != "???" and name not in merged})


def model_references(node: Any) -> list[str]:
    """Names in every `{"type": "responses_api_models", "name": instance}` below `node`."""
    if isinstance(node, dict):
        own = [node["name"]] if node.get("type") == "responses_api_models" and "name" in node else []
        names = [name for name in own if isinstance(name, str) and "${" not in name]
        return names + [name for child in node.values() for name in model_references(child)]
    return [name for child in node for name in model_references(child)] if isinstance(node, list) else []


def direct_urls(config: dict[str, Any]) -> list[str]:
    """Keys with a placeholder URL that servers other than model servers interpolate."""
    blocks = [block for block in config.values() if isinstance(block, dict)]
    used = {key for block in blocks for kind in INSTANCE_KINDS[:2] for key in interpolated(block.get(kind))}
    return sorted(key for key in used if config.get(key) == NOWHERE)


def interpolated(node: Any) -> set[str]:
    """Top-level keys that the strings below `node` interpolate as `${key}`."""
    if isinstance(node, str):
        return set(re.findall(r"\$\{([A-Za-z_]\w*)\}", node))
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return {key for child in children for key in interpolated(child)}


def blanks(node: Any, only: str = "") -> list[str]:
    """Dotted paths of the `???` below `node` (below its key `only`, if given)."""
    if node == "???":
        return [""]
    if not isinstance(node, dict):
        return []
    items = [(key, child) for key, child in node.items() if not only or key == only]
    return [f"{key}.{path}".rstrip(".") for key, child in items for path in blanks(child)]


def placeholder(key: str) -> str:
    return NOWHERE if key.endswith("url") else "gymgate"


def ray_head(order: dict[str, Any]) -> None:
    """Be the driver of a local Ray until killed; its address goes to `out`."""
    os.environ.update(
        RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0", RAY_ENABLE_UV_RUN_RUNTIME_ENV="0"
    )
    ray: Any = importlib.import_module("ray")
    ray.init(include_dashboard=False, log_to_driver=False)
    ready = Path(order["out"])
    ready.with_suffix(".tmp").write_text(ray.get_runtime_context().gcs_address)
    ready.with_suffix(".tmp").rename(ready)
    while True:
        signal.pause()


CHILDREN = {"parse": parse, "serve": serve, "ray": ray_head}


class ForkServer:
    """The loop: single-threaded, so that a fork copies a consistent process."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.received = b""
        self.children: dict[int, int] = {}
        """pid -> id of the order it was started by."""
        self.wakeup, self.waker = socket.socketpair()
        for end in (self.wakeup, self.waker):
            end.setblocking(False)

    def run(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the daemon's to handle
        signal.set_wakeup_fd(self.waker.fileno(), warn_on_full_buffer=False)
        self.emit(event="ready", threads=len(list(Path("/proc/self/task").iterdir())))
        while True:
            readable, _, _ = select.select([self.control, self.wakeup], [], [])
            if self.wakeup in readable:
                self.wakeup.recv(4096)
                self.reap()
            if self.control in readable and not self.receive():
                return

    def emit(self, **event: Any) -> None:
        self.control.sendall(json.dumps(event).encode() + b"\n")

    def receive(self) -> bool:
        """Handle what has arrived; false at the end of the orders."""
        data = self.control.recv(1 << 20)
        *lines, self.received = (self.received + data).split(b"\n")
        for line in lines:
            self.handle(json.loads(line))
        return bool(data)

    def handle(self, order: dict[str, Any]) -> None:
        if order["op"] == "kill":
            if order["pid"] in self.children:
                send_signal(order["pid"], order["signal"])  # it may not lead its group yet
                if order["group"]:
                    send_signal(order["pid"], order["signal"], group=True)
            return
        pid = self.fork(order)
        self.children[pid] = order["id"]
        self.emit(event="started", id=order["id"], pid=pid)

    def fork(self, order: dict[str, Any]) -> int:
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                self.enter_child(order, parent)
                CHILDREN[order["op"]](order)
                status = 0
            except SystemExit as stop:
                status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
            except BaseException:
                traceback.print_exc()
            finally:
                flush_all()
                os._exit(status & 0xFF)
        return pid

    def enter_child(self, order: dict[str, Any], parent: int) -> None:
        """Own session, log and signals; die with the fork server."""
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for end in (self.control, self.wakeup, self.waker):
            end.close()
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.environ[SERVER_TAG] = str(os.getpid())

    def reap(self) -> None:
        """Report the children that ended, and kill what they left behind."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self.children.pop(pid, None) is None:
                continue  # a helper that lost its server, and ended
            for helper in helpers_of(pid):
                send_signal(helper, signal.SIGKILL)
            self.emit(event="exited", pid=pid, status=os.waitstatus_to_exitcode(status))

    def kill_all(self) -> None:
        """Kill every descendant, until none is left or a second has passed."""
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            for pid in descendants(os.getpid()):
                send_signal(pid, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            time.sleep(0.01)


def send_signal(pid: int, number: int, *, group: bool = False) -> None:
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if group else os.kill)(pid, number)


def flush_all() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def processes() -> dict[int, tuple[int, int]]:
    """pid -> (parent, session)."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            found[int(entry.name)] = (int(fields[1]), int(fields[3]))
    return found


def descendants(root: int) -> list[int]:
    parents = {pid: parent for pid, (parent, _) in processes().items()}
    found: list[int] = []
    frontier = [root]
    while frontier:
        frontier = [pid for pid, parent in parents.items() if parent in frontier]
        found.extend(frontier)
    return found


def helpers_of(server: int) -> list[int]:
    """Processes that a dead server started: of its session, or carrying its mark."""
    own = descendants(os.getpid())
    sessions = processes()
    return [pid for pid in own if sessions.get(pid, (0, 0))[1] == server or marked(pid, server)]


def marked(pid: int, server: int) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{SERVER_TAG}={server}".encode() in environment.split(b"\0")


def main() -> None:
    sys.path.pop(0)  # our own directory, which servers must not import from
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    sys.argv = sys.argv[:1]
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # while importing; afterwards the end of the orders says it
    preload()
    prctl(PR_SET_PDEATHSIG, 0)
    server = ForkServer(control)
    gc.collect()
    gc.freeze()
    try:
        server.run()
    except OSError:
        pass  # the daemon is gone
    finally:
        server.kill_all()


if __name__ == "__main__":
    main()
