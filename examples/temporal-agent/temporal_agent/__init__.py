"""An agent whose answers are activities of Temporal.

Imports nothing: what a workflow imports is imported anew for each workflow, its package with it.
"""
