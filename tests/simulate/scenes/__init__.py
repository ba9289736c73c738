"""The scenes, by name. A new one is a module with a `SCENE`, and a line here."""

from universes import Scene

from scenes import collect, gateway, http, leases, rpc

SCENES: dict[str, Scene] = {
    scene.name: scene for scene in (rpc.SCENE, http.SCENE, gateway.SCENE, leases.SCENE, collect.SCENE)
}
