"""The scenes, by name. A new one is a module with a `SCENE`, and its name here."""

from universes import Scene

from scenes import collect, collectors, disk, gateway, http, leases, replicas, resends, restarts, rpc, world

_MODULES = (rpc, http, replicas, gateway, resends, leases, collect, disk, collectors, restarts, world)
SCENES: dict[str, Scene] = {module.SCENE.name: module.SCENE for module in _MODULES}
