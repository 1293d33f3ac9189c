"""Run ranks on a running engine (Ray, Dask or Spark), like ``fl.spawn``.

``fl.launch`` imports these modules by name. No other module of the package imports this folder.
"""
