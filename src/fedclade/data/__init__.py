"""Data: sources, partitions and shifts, and the federation that they make.

Runs, the network, configs and the papers import it; it imports :mod:`fedclade.core` alone.
"""

from fedclade.data.arrays import InputKind
from fedclade.data.augment import Augment, augment_of
from fedclade.data.cache import cache_folder
from fedclade.data.cell_values import Notation
from fedclade.data.client_data import ClientData, mapped
from fedclade.data.client_table import ClientTable, SplitRows
from fedclade.data.concepts import concepts
from fedclade.data.custom import one_client, pool_from_torch
from fedclade.data.drift import Drift
from fedclade.data.federation import Federation
from fedclade.data.files import FilesSettings, matches, read_sheet
from fedclade.data.folder import open_folder
from fedclade.data.folder_writing import ClientBlock, OnClients, write_federation, write_folder
from fedclade.data.frames import federation_from_frame
from fedclade.data.load import check_data_settings, check_newcomers, load_federation
from fedclade.data.own import OwnSettings, federation
from fedclade.data.partition import PARTITIONS, Partition, Parts, partition_named, partition_pool
from fedclade.data.planted import PlantedSettings, write_planted
from fedclade.data.poisoned import Backdoor, LabelFlip, poisoned
from fedclade.data.pool import Pool
from fedclade.data.sheets import Rows, Sheet
from fedclade.data.shift import SHIFTS, Shift, View, shift_named, shift_views
from fedclade.data.sources import SOURCES, Source, load_pool
from fedclade.data.stages import Stage
from fedclade.data.standardize import rescaled, statistics
from fedclade.data.typed_columns import ColumnRoles, prepare_sheets

__all__ = [
    "PARTITIONS",
    "SHIFTS",
    "SOURCES",
    "Augment",
    "Backdoor",
    "ClientBlock",
    "ClientData",
    "ClientTable",
    "ColumnRoles",
    "Drift",
    "Federation",
    "FilesSettings",
    "InputKind",
    "LabelFlip",
    "Notation",
    "OnClients",
    "OwnSettings",
    "Partition",
    "Parts",
    "PlantedSettings",
    "Pool",
    "Rows",
    "Sheet",
    "Shift",
    "Source",
    "SplitRows",
    "Stage",
    "View",
    "augment_of",
    "cache_folder",
    "check_data_settings",
    "check_newcomers",
    "concepts",
    "federation",
    "federation_from_frame",
    "load_federation",
    "load_pool",
    "mapped",
    "matches",
    "one_client",
    "open_folder",
    "partition_named",
    "partition_pool",
    "poisoned",
    "pool_from_torch",
    "prepare_sheets",
    "read_sheet",
    "rescaled",
    "shift_named",
    "shift_views",
    "statistics",
    "write_federation",
    "write_folder",
    "write_planted",
]
