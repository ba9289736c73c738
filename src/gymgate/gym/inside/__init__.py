"""Code that runs in NeMo Gym's interpreter, loaded under another name: it imports the standard library and its siblings alone."""
