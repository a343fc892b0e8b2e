"""Certificates: the checks, files and versions of a result; and their verification."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from nrl_models import __version__
from nrl_models.certify.certified import file_hashes
from nrl_models.certify.check_result import LOGPROBS, OTHER_CELLS, Answer, CheckResult, Side, Status
from nrl_models.certify.signing import signature_problem
from nrl_models.common.checkpoint.json_reading import parsed, read_object
from nrl_models.common.checkpoint.resolve_folder import resolve_folder
from nrl_models.common.checkpoint.writing import write_whole
from nrl_models.common.trust.servers import shown_argument
from nrl_models.consistency.capsule.package_versions import versions
from nrl_models.errors import CheckpointError, ConsistencyError, one_line, visible

FORMAT = 3
"""Version of the file format."""

_DECIDED = (Status.PASSED, Status.FAILED)


class Validity(StrEnum):
    """The outcome of a verification."""

    VALID = "valid"
    VOID = "void"
    """The certificate or a file of the checkpoint has changed."""
    NARROWER = "narrower"
    """The certificate is intact and covers less than requested, or other versions."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of `verify`.

    Args:
        validity: its outcome.
        reasons: Changed or uncovered parts; empty if valid.
        answer: the answer in the certificate; None if void.
    """

    validity: Validity
    reasons: tuple[str, ...]
    answer: Answer | None = None


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The results of all checks, and everything they depend on.

    Args:
        name: name of the checkpoint.
        answer: ready, not ready, or not decided.
        created: date and time in UTC, ISO 8601.
        files: SHA-256 of each file of the checkpoint, by its path.
        options: engine, dtype, device, matrix and seed.
        versions: versions of packages.
        hardware: processor and GPU.
        results: the results, in order.
        not_covered: what no check covers.
        folder: directory of results and reports; None if not saved.
    """

    name: str
    answer: Answer
    created: str
    files: Mapping[str, str]
    options: Mapping[str, Any]
    versions: Mapping[str, str]
    hardware: Mapping[str, str]
    results: tuple[CheckResult, ...]
    not_covered: tuple[str, ...]
    folder: Path | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {self.answer}, {self.created}>"

    @classmethod
    def of(cls, **values: Any) -> Certificate:
        """Create a certificate with the present date."""
        return cls(created=datetime.now(UTC).isoformat(timespec="seconds"), **values)

    def with_status(self, status: Status) -> list[CheckResult]:
        """Return the results with a status."""
        return [result for result in self.results if result.status is status]

    @property
    def sentence(self) -> str:
        """The answer in one sentence, then the counts of results."""
        return f"{self.subject}: {self.answer}. {self.counts}"

    @property
    def subject(self) -> str:
        """The checkpoint and the engine, and the number of layers if it is limited."""
        engine = f" with {self.options['engine']}" if self.options["engine"] else ""
        limited = self.options.get("layers")
        return f"{self.name}{engine}" + ("" if limited is None else f", only {layers_in_words(limited)}")

    @property
    def counts(self) -> str:
        """How many checks passed; number and names of the others; the source of a failure."""
        passed = len(self.with_status(Status.PASSED))
        text = f"{passed} {'check' if passed == 1 else 'checks'} passed"
        for status in (Status.FAILED, Status.NOT_DECIDED, Status.LEFT_OUT, Status.NOT_COVERED):
            if results := self.with_status(status):
                text += f", {len(results)} {status} ({', '.join(result.name for result in results)})"
        return text + "." + (f" Source of the failure: {self.side}." if self.side else "")

    @property
    def side(self) -> Side | None:
        """The source of the first failure that has one."""
        return next((result.side for result in self.with_status(Status.FAILED) if result.side), None)

    @property
    def longest(self) -> int:
        """Length of the longest sequence that trainer and engine agree on, in tokens; 0 if there is none."""
        return max((result.length for result in self.with_status(Status.PASSED)), default=0)

    @property
    def compared_with(self) -> str | None:
        """The engine whose log-probabilities were compared with the trainer's; None if no comparison was decided."""
        compared = any(result.name == LOGPROBS and result.status in _DECIDED for result in self.results)
        return self.options["engine"] if compared else None

    @property
    def has_full_matrix(self) -> bool:
        """Whether the 36 cells of NeMo RL's guide were compared."""
        complete = all(result.name != OTHER_CELLS for result in self.with_status(Status.NOT_COVERED))
        return self.options["full"] and complete and self.compared_with is not None

    def to_json(self) -> dict[str, Any]:
        """Return the certificate with its digest, which covers everything else."""
        content = {
            "format": FORMAT,
            "name": self.name,
            "answer": self.answer,
            "created": self.created,
            "files": dict(self.files),
            "options": dict(self.options),
            "versions": dict(self.versions),
            "hardware": dict(self.hardware),
            "checks": [result.to_json() for result in self.results],
            "not_covered": list(self.not_covered),
        }
        return content | {"digest": json_digest(content)}

    def save(self, file: Path) -> None:
        """Write the certificate."""
        write_whole(file, _file_bytes(self.to_json()))

    @classmethod
    def load(cls, file: Path) -> Certificate:
        """Read a certificate and check its digest.

        Raises:
            ConsistencyError: the file is not a certificate, has another format version, or was changed.
        """
        try:
            content = read_object(file)
        except CheckpointError as error:
            raise ConsistencyError(f"{file} is not a certificate ({one_line(error)})") from error
        if content.get("format") != FORMAT:
            written_by = content.get("versions")
            writer = written_by.get("nrl_models") if isinstance(written_by, dict) else None
            reader = f", which nrl_models {visible(str(writer))} reads" if writer else ""
            raise ConsistencyError(
                f"{file} has certificate format {visible(str(content.get('format')))}{reader}; the installed "
                f"nrl_models {__version__} reads format {FORMAT}"
            )
        # The digest covers values. Compare the bytes as well: white space and escapes can change without them.
        rest = {key: value for key, value in content.items() if key != "digest"}
        if content.get("digest") != json_digest(rest) or file.read_bytes() != _file_bytes(content):
            raise ConsistencyError(f"{file} has been changed since it was written: its digest does not match")
        try:  # anybody can write a digest
            rest["results"] = rest.pop("checks")
            certificate: Certificate = parsed(cls, {name: rest[name] for name in _FIELDS}, strict=True)
            options = {"layers": None, **certificate.options}
            for name, kind in _OPTIONS.items():
                parsed(kind, options[name], strict=True)
        except (KeyError, ValueError) as error:
            raise ConsistencyError(f"{file} is not a certificate ({one_line(error)})") from error
        return certificate


_FIELDS = tuple(field.name for field in fields(Certificate) if field.name != "folder")

_OPTIONS: Mapping[str, Any] = {"engine": str | None, "full": bool, "layers": int | None}
"""Types of the options that `verify` or a report uses."""


def verify(
    file: Path,
    path: str | Path,
    *,
    engine: str | None = None,
    full: bool = False,
    length: int = 0,
    public_key: Path | None = None,
) -> Verification:
    """Verify that a certificate is intact and describes a checkpoint.

    Args:
        file: the certificate.
        path: the checkpoint.
        engine: engine that the certificate must cover; None for any.
        full: require the 36 cells of NeMo RL's guide.
        length: length of sequences in tokens that the certificate must cover.
        public_key: require a signature of this Ed25519 key, see `nrl_models.certify.signing`.

    Raises:
        CheckpointError: the checkpoint does not exist.
        ConsistencyError: `public_key` is not a public key, or cannot be used here.
    """
    hashes = file_hashes(resolve_folder(path))
    try:
        certificate = Certificate.load(file)
    except ConsistencyError as error:
        return Verification(validity=Validity.VOID, reasons=(str(error),))
    if public_key is not None and (problem := signature_problem(file, public_key)):
        return Verification(validity=Validity.VOID, reasons=(problem,))
    changed = [f"{name}: removed" for name in certificate.files if name not in hashes]
    changed += [f"{name}: added" for name in hashes if name not in certificate.files]
    changed += [f"{name}: changed" for name in hashes if certificate.files.get(name, hashes[name]) != hashes[name]]
    if changed:
        return Verification(validity=Validity.VOID, reasons=tuple(sorted(changed)))
    narrower = []
    requested = None if engine is None else shown_argument(engine)
    if requested is not None and certificate.compared_with != requested:
        narrower.append(f"engine: {certificate.compared_with or 'none'} was checked, not {requested}")
    if length > certificate.longest:
        narrower.append(f"length: {certificate.longest:,} tokens were checked, not {length:,}")
    if certificate.options.get("layers") is not None:
        count = certificate.options["layers"]
        narrower.append(f"layers: only {layers_in_words(count)} {'was' if count == 1 else 'were'} checked")
    if full and not certificate.has_full_matrix:
        narrower.append("matrix: not all of the guide's 36 cells were checked (log-probabilities)")
    installed = versions()
    narrower += [
        f"{package}: {version} was checked, {installed.get(package, 'none')} is installed"
        for package, version in certificate.versions.items()
        if installed.get(package) != version
    ]
    validity = Validity.NARROWER if narrower else Validity.VALID
    return Verification(validity=validity, reasons=tuple(narrower), answer=certificate.answer)


def _file_bytes(content: Mapping[str, Any]) -> bytes:
    """Return the contents of a certificate's file."""
    return (json.dumps(content, indent=1) + "\n").encode()


def json_digest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON object, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def layers_in_words(layers: int) -> str:
    """Describe the layers that were checked in words."""
    return "the first layer" if layers == 1 else f"the first {layers} layers"
