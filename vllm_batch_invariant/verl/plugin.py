"""For ``VERL_USE_EXTERNAL_MODULES``: registers what this package has for verl, when verl imports it."""

from . import register

register()
