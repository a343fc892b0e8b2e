"""Certify a checkpoint with an engine: run all checks, give one answer (ready, not ready, not decided), and save it."""

from nrl_models.certify.all_checks import certify
from nrl_models.certify.certificate import Certificate, Validity, Verification, verify
from nrl_models.certify.check_result import Answer, CheckResult, Side, Status

__all__ = [
    "Answer",
    "Certificate",
    "CheckResult",
    "Side",
    "Status",
    "Validity",
    "Verification",
    "certify",
    "verify",
]
