"""Puts the bundled family, the demonstration page and the cards' templates into wheels; all else: pyproject.toml.

Each lies once in the repository. A wheel holds them inside the package, where `kvbridge_hf.bundled` looks first. An
editable install needs no copies: there they are found in the checkout.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.errors import SetupError

# folder of the repository -> folder of the package
FOLDERS = {
    "examples/tinytown/models": "tinytown/models",
    "examples/tinytown/mappers": "tinytown/mappers",
    "examples/tinytown/questions": "tinytown/questions",
    "examples/tinytown/texts": "tinytown/texts",
    "spaces/handoff-demo": "handoff-demo",
    "hub_cards/templates": "hub_cards",
}


class BuildWithBundle(build_py):
    """`build_py` that also copies the folders above."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self._check()
            for source, copy in self._bundle().items():
                self.mkpath(str(Path(copy).parent))
                self.copy_file(source, copy, preserve_mode=False)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        bundle = [] if self.editable_mode else list(self._bundle().values())
        return [*super().get_outputs(include_bytecode), *bundle]

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *self._bundle()]

    @staticmethod
    def _check() -> None:
        missing = [folder for folder in FOLDERS if not Path(folder).is_dir()]
        if missing:
            raise SetupError(
                f"{', '.join(missing)} missing: a wheel without could not run the demo or write cards. "
                "Build from a complete checkout or from the sdist."
            )

    def _bundle(self) -> dict[str, str]:
        """File in the repository -> its copy in the build folder."""
        package = Path(self.build_lib) / "kvbridge_hf"
        return {
            file.as_posix(): str(package / target / file.relative_to(folder))
            for folder, target in FOLDERS.items()
            for file in sorted(Path(folder).rglob("*"))
            if file.is_file() and "__pycache__" not in file.parts
        }


setup(cmdclass={"build_py": BuildWithBundle})
