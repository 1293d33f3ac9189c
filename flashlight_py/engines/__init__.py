"""``spawn`` on an engine that is there already: Ray, Dask or Spark.

``fl.launch`` finds the modules of engines by their names; nothing else knows of this folder.
"""
