"""A real inference engine and a real model on a CPU: vLLM and SmolLM2-135M-Instruct. Needs `.venv-engine` (`./dev engine`)."""
