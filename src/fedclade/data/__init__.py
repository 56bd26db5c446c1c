"""Data: sources, partitions and shifts, and the federation that they make.

Runs, the network and configs import it; it imports :mod:`fedclade.core` alone.
"""

from fedclade.data.agreement import Agreement, Encoding, Proposal, agree, encode_federation
from fedclade.data.arrays import InputKind, cache_folder
from fedclade.data.cell_values import Notation
from fedclade.data.client_data import Augment, ClientData, Stage, map_labels, resolve_augment
from fedclade.data.client_statistics import Statistics, StatisticsQuery, bounded, compute_statistics
from fedclade.data.client_table import ClientTable, SplitRows
from fedclade.data.columns import Rows, Sheet
from fedclade.data.concepts import PlantedSettings, concepts, write_planted
from fedclade.data.drift import Drift
from fedclade.data.federation import Federation
from fedclade.data.files import (
    FilesSettings,
    TableSource,
    federation_from_frame,
    match_files,
    read_sheet,
)
from fedclade.data.folder import open_folder
from fedclade.data.folder_writing import ClientBlock, OnClients, write_federation, write_folder
from fedclade.data.load import check_data_settings, check_newcomers, load_federation
from fedclade.data.partition import PARTITIONS, Partition, Parts, find_partition, partition_pool
from fedclade.data.poisoned import Backdoor, LabelFlip, poison_federation
from fedclade.data.pool import Pool
from fedclade.data.schema import (
    DataSchema,
    InputColumn,
    SchemaError,
    name_differences,
    read_declared,
    show_some,
)
from fedclade.data.shift import SHIFTS, Shift, View, find_shift, shift_views
from fedclade.data.sources import SOURCES, Source, load_pool
from fedclade.data.standardize import rescale_federation
from fedclade.data.typed_columns import ColumnRoles, prepare_sheets
from fedclade.data.user_data import OwnSettings, federation, one_client, pool_from_torch

__all__ = [
    "PARTITIONS",
    "SHIFTS",
    "SOURCES",
    "Agreement",
    "Augment",
    "Backdoor",
    "ClientBlock",
    "ClientData",
    "ClientTable",
    "ColumnRoles",
    "DataSchema",
    "Drift",
    "Encoding",
    "Federation",
    "FilesSettings",
    "InputColumn",
    "InputKind",
    "LabelFlip",
    "Notation",
    "OnClients",
    "OwnSettings",
    "Partition",
    "Parts",
    "PlantedSettings",
    "Pool",
    "Proposal",
    "Rows",
    "SchemaError",
    "Sheet",
    "Shift",
    "Source",
    "SplitRows",
    "Stage",
    "Statistics",
    "StatisticsQuery",
    "TableSource",
    "View",
    "agree",
    "bounded",
    "cache_folder",
    "check_data_settings",
    "check_newcomers",
    "compute_statistics",
    "concepts",
    "encode_federation",
    "federation",
    "federation_from_frame",
    "find_partition",
    "find_shift",
    "load_federation",
    "load_pool",
    "map_labels",
    "match_files",
    "name_differences",
    "one_client",
    "open_folder",
    "partition_pool",
    "poison_federation",
    "pool_from_torch",
    "prepare_sheets",
    "read_declared",
    "read_sheet",
    "rescale_federation",
    "resolve_augment",
    "shift_views",
    "show_some",
    "write_federation",
    "write_folder",
    "write_planted",
]
