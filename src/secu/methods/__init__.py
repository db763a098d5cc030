"""Methods, which learn from images without labels, and the predictor for a trained model."""

from secu.methods.base import Conclusion, Method, build_method
from secu.methods.predictor import Predictions, Predictor

__all__ = ["Conclusion", "Method", "Predictions", "Predictor", "build_method"]
