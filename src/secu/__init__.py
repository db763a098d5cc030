"""SeCu: one-stage deep clustering of images without labels.

Read the package in the order in which an image passes through it: data, augment, backbones, model, losses,
constraints, centers, clustering, evaluate, train. The README has the tour.
"""

__version__ = "0.1.0"
