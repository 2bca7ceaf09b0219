"""onebox runs a 100B-class hybrid mixture-of-experts model on one box."""

__version__ = "0.1.0"
