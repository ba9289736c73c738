"""SkyRL: a generator and a dataset that an entrypoint of SkyRL gives its trainer, as `gymgate.skyrl.NAME`."""
