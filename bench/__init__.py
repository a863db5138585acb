"""Benchmarks: what the framework costs, against a bare asyncio loop and against other frameworks. `python -m bench`.

`peers/` is the harness: one small adapter per framework, all doing the work that `peers/common.py` defines with an
in-process fake model that answers at once. The peers' adapters are kept as they are.
"""
