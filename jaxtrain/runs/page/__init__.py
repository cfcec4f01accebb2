"""The web page of `jaxtrain ui`: a folder of runs, live, served to this machine alone.

The browser loads the files of `static/` without a build step. `uplot.*` there is uPlot 1.6.32,
under its own licence. `jaxtrain compare --html` embeds the same files in one page.
"""
