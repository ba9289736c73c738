"""The scenes, by name. A new one is a module with a `SCENE`, and its name here."""

from universes import Scene

from scenes import (
    cancels,
    collect,
    collectors,
    disk,
    gateway,
    http,
    leases,
    replicas,
    resends,
    restarts,
    rpc,
    world,
)

_MODULES = (
    rpc,
    http,
    replicas,
    gateway,
    resends,
    leases,
    collect,
    disk,
    collectors,
    restarts,
    cancels,
    world,
)
SCENES: dict[str, Scene] = {
    scene.name: scene for scene in (*(module.SCENE for module in _MODULES), leases.VISITS)
}
