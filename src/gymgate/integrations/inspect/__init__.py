"""NeMo Gym as Inspect AI tasks: what `gymgate.inspect` exports, and collected runs written as Inspect's logs.

inspect eval gymgate/nemo_gym -T env=mcqa --model openai/gpt-5
"""
