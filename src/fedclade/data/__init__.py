"""Data of federations: sources of examples, and their division among clients.

A *pool* contains the examples of all clients. A *partition* assigns the examples of a pool to
clients, a *shift* gives each true cluster another view of the examples (such as swapped labels or
rotated images), and a *federation* is the resulting set of clients with their data. Of the other
subpackages, this subpackage imports only :mod:`fedclade.core`.
"""

from typing import TYPE_CHECKING

from fedclade.core import lazy_names

if TYPE_CHECKING:
    from fedclade.data.agreement import Agreement, Encoding, Proposal, agree, encode_federation
    from fedclade.data.arrays import InputKind, cache_folder
    from fedclade.data.attributes import (
        Attributes,
        as_attributes,
        check_attributes,
        read_attributes,
    )
    from fedclade.data.cell_values import Notation
    from fedclade.data.client_data import Augment, ClientData, Stage, map_labels, resolve_augment
    from fedclade.data.client_statistics import (
        Statistics,
        StatisticsQuery,
        bounded,
        compute_statistics,
    )
    from fedclade.data.client_table import ClientTable, SplitRows
    from fedclade.data.client_traits import Trait, describe_clients
    from fedclade.data.columns import Rows, Sheet, read_sheet
    from fedclade.data.concepts import PlantedSettings, concepts, write_planted
    from fedclade.data.csv_format import TextFormat
    from fedclade.data.drift import Drift
    from fedclade.data.federation import Federation
    from fedclade.data.files import (
        FilesSettings,
        TableSource,
        choose_excluded,
        federation_from_frame,
        match_files,
    )
    from fedclade.data.folder import open_folder
    from fedclade.data.folder_writing import ClientBlock, OnClients, write_federation, write_folder
    from fedclade.data.inspection import FEW_ROWS, ClientInfo, ColumnInfo, Inspection, inspect_files
    from fedclade.data.load import check_data_settings, check_newcomers, load_federation
    from fedclade.data.missing import MISSING, ColumnSummary, Missing
    from fedclade.data.new_rows import InputEncoding, NewRows, encode_new_rows
    from fedclade.data.partition import PARTITIONS, Partition, Parts, find_partition, partition_pool
    from fedclade.data.poisoned import Backdoor, LabelFlip, poison_federation
    from fedclade.data.pool import Pool
    from fedclade.data.reading import NamedColumns, is_dataset
    from fedclade.data.schema import (
        DataSchema,
        InputColumn,
        SchemaError,
        join_some,
        name_differences,
        read_declared,
        show_some,
    )
    from fedclade.data.shift import SHIFTS, Shift, View, find_shift, shift_views
    from fedclade.data.sources import SOURCES, Source, load_pool
    from fedclade.data.standardize import (
        replace_pool,
        rescale_federation,
        scale_as_in_run,
        undo_default_scaling,
    )
    from fedclade.data.typed_columns import ColumnRoles, prepare_sheets
    from fedclade.data.user_data import OwnSettings, federation, one_client, pool_from_torch

__all__ = [
    "FEW_ROWS",
    "MISSING",
    "PARTITIONS",
    "SHIFTS",
    "SOURCES",
    "Agreement",
    "Attributes",
    "Augment",
    "Backdoor",
    "ClientBlock",
    "ClientData",
    "ClientInfo",
    "ClientTable",
    "ColumnInfo",
    "ColumnRoles",
    "ColumnSummary",
    "DataSchema",
    "Drift",
    "Encoding",
    "Federation",
    "FilesSettings",
    "InputColumn",
    "InputEncoding",
    "InputKind",
    "Inspection",
    "LabelFlip",
    "Missing",
    "NamedColumns",
    "NewRows",
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
    "TextFormat",
    "Trait",
    "View",
    "agree",
    "as_attributes",
    "bounded",
    "cache_folder",
    "check_attributes",
    "check_data_settings",
    "check_newcomers",
    "choose_excluded",
    "compute_statistics",
    "concepts",
    "describe_clients",
    "encode_federation",
    "encode_new_rows",
    "federation",
    "federation_from_frame",
    "find_partition",
    "find_shift",
    "inspect_files",
    "is_dataset",
    "join_some",
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
    "read_attributes",
    "read_declared",
    "read_sheet",
    "replace_pool",
    "rescale_federation",
    "resolve_augment",
    "scale_as_in_run",
    "shift_views",
    "show_some",
    "undo_default_scaling",
    "write_federation",
    "write_folder",
    "write_planted",
]

if not TYPE_CHECKING:  # a type checker knows the names from the imports above
    __getattr__ = lazy_names(__name__)
