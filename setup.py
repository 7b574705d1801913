"""Puts the bundled Tinytown family into wheels; everything else about the package stands in pyproject.toml.

The family lies once in the repository, under `examples/tinytown/`. A wheel holds it as `kvbridge_hf/tinytown/`, where
`kvbridge_hf.bundled` looks first. An editable install needs no copy: there `bundled` finds `examples/tinytown/`.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.errors import SetupError

FAMILY = Path("examples/tinytown")
PARTS = ("models", "mappers", "questions", "texts")


class BuildWithFamily(build_py):
    """`build_py` that also copies the family's models, mappers, questions and texts."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self._check()
            for source, copy in self._family().items():
                self.mkpath(str(Path(copy).parent))
                self.copy_file(source, copy, preserve_mode=False)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        family = [] if self.editable_mode else list(self._family().values())
        return [*super().get_outputs(include_bytecode), *family]

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *self._family()]

    @staticmethod
    def _check() -> None:
        missing = [part for part in PARTS if not (FAMILY / part).is_dir()]
        if missing:
            raise SetupError(
                f"{FAMILY} lacks {', '.join(missing)}: a wheel without them could not run `kvbridge demo`. "
                "Build from a complete checkout or from the sdist."
            )

    def _family(self) -> dict[str, str]:
        """File in the repository -> its copy in the build folder."""
        packaged = Path(self.build_lib) / "kvbridge_hf" / "tinytown"
        files = sorted(file for part in PARTS for file in (FAMILY / part).rglob("*") if file.is_file())
        return {
            file.as_posix(): str(packaged / file.relative_to(FAMILY))
            for file in files
            if "__pycache__" not in file.parts
        }


setup(cmdclass={"build_py": BuildWithFamily})
