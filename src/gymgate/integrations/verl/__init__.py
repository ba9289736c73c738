"""verl: an agent loop, a dataset and replay buffers that verl's config names as `gymgate.verl.NAME`."""
