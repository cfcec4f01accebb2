"""The web page of `jaxtrain ui`: a folder of runs, live, served to this machine alone.

`static/` is what the browser loads, without a build step; `uplot.*` there is uPlot 1.6.32, under
its own licence. `jaxtrain compare --html` puts the same files into one.
"""
