"""Formats that need to see a model at work before they can store it: a text is read, and what it cost is measured."""

from graftlm.calibration.quantize import CalibrationReport, quantize_calibrated
from graftlm.calibration.text import CalibrationText, read_calibration_text

__all__ = ["CalibrationReport", "CalibrationText", "quantize_calibrated", "read_calibration_text"]
