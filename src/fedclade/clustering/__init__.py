"""Clustering of clients by signatures of their updates.

The package contains similarities and distances, bi-partition, linkage, FedGroup's EDC (Euclidean
distance of decomposed cosine similarity), subspace angles, significance tests for clusters (by
halves and by parts of each client's data), CFL's criteria, and the assignment of newcomers, which
are clients that join after training. Its functions work on tensors and parameter trees, without a
run or clients; only the assignment of newcomers sends queries to clients. The package imports only
:mod:`fedclade.core`.
"""

from typing import TYPE_CHECKING

from fedclade.core import lazy_names

if TYPE_CHECKING:
    from fedclade.clustering.descriptors import (
        DescriptorSpace,
        assign_to_nearest_descriptor,
        choose_epsilon_by_knee,
        compute_point_distances,
        require_descriptors,
    )
    from fedclade.clustering.explained import PERMUTATIONS, Explained, explain_differences
    from fedclade.clustering.far_branches import FarGroup, find_far_groups
    from fedclade.clustering.linkage import (
        CENTROID,
        LINKAGES,
        Merges,
        agglomerate,
        choose_cut,
        count_clusters_by_gap,
        cut,
        find_cut_height,
        merge_by_centroids,
    )
    from fedclade.clustering.part_test import (
        CUT,
        LARGEST_TESTED_BY_PARTS,
        VIEWS,
        PartFinding,
        average_client_similarity,
        build_views,
        choose_part_count,
        compute_gain_by_parts,
        compute_lowest_p_value,
        compute_part_similarity,
        count_shuffles,
        estimate_gammas,
        estimate_noise,
        find_by_parts,
    )
    from fedclade.clustering.parts_in_turn import compute_e_value_by_parts, find_clusters_by_parts
    from fedclade.clustering.repeated_test import (
        MOST_SHUFFLES,
        RepeatedTest,
        compute_largest_e_value,
        compute_least_share,
        compute_rank_e_value,
        find_smallest_group,
        is_due,
    )
    from fedclade.clustering.routing import (
        Assignment,
        LossEstimate,
        Step,
        assign_to_lowest_loss,
        assign_to_root,
        check_fit_by_loss,
        compute_leaf_losses,
        compute_training_losses,
        estimate_by_loss,
        place_in_branches,
        require_updates,
        route,
        walk_down,
    )
    from fedclade.clustering.sampling import (
        assign_to_nearest_mean,
        draw_cell_points,
        find_cell_centres,
        find_directions,
    )
    from fedclade.clustering.separation import (
        MOST_PAIRED,
        SplitCriteria,
        bound_cross_similarity,
        bound_intra_similarity,
        gamma_bound,
        separation_gap,
    )
    from fedclade.clustering.similarity import (
        METRICS,
        Distances,
        Labels,
        Points,
        Similarity,
        are_signs,
        compute_angles,
        compute_cosines,
        compute_distances,
        compute_nearest_angles,
        convert_sign_cosines,
        cosine_similarity,
        k_means,
        ternary_similarity,
    )
    from fedclade.clustering.spanning_tree import find_optimal_bipartition, single_linkage
    from fedclade.clustering.split_half import (
        LARGEST_TESTED_BY_HALVES,
        Finding,
        Replicates,
        compute_gain,
        find_clusters,
        is_same_partition,
    )
    from fedclade.clustering.stability import Stability, measure_stability

__all__ = [
    "CENTROID",
    "CUT",
    "LARGEST_TESTED_BY_HALVES",
    "LARGEST_TESTED_BY_PARTS",
    "LINKAGES",
    "METRICS",
    "MOST_PAIRED",
    "MOST_SHUFFLES",
    "PERMUTATIONS",
    "VIEWS",
    "Assignment",
    "DescriptorSpace",
    "Distances",
    "Explained",
    "FarGroup",
    "Finding",
    "Labels",
    "LossEstimate",
    "Merges",
    "PartFinding",
    "Points",
    "RepeatedTest",
    "Replicates",
    "Similarity",
    "SplitCriteria",
    "Stability",
    "Step",
    "agglomerate",
    "are_signs",
    "assign_to_lowest_loss",
    "assign_to_nearest_descriptor",
    "assign_to_nearest_mean",
    "assign_to_root",
    "average_client_similarity",
    "bound_cross_similarity",
    "bound_intra_similarity",
    "build_views",
    "check_fit_by_loss",
    "choose_cut",
    "choose_epsilon_by_knee",
    "choose_part_count",
    "compute_angles",
    "compute_cosines",
    "compute_distances",
    "compute_e_value_by_parts",
    "compute_gain",
    "compute_gain_by_parts",
    "compute_largest_e_value",
    "compute_leaf_losses",
    "compute_least_share",
    "compute_lowest_p_value",
    "compute_nearest_angles",
    "compute_part_similarity",
    "compute_point_distances",
    "compute_rank_e_value",
    "compute_training_losses",
    "convert_sign_cosines",
    "cosine_similarity",
    "count_clusters_by_gap",
    "count_shuffles",
    "cut",
    "draw_cell_points",
    "estimate_by_loss",
    "estimate_gammas",
    "estimate_noise",
    "explain_differences",
    "find_by_parts",
    "find_cell_centres",
    "find_clusters",
    "find_clusters_by_parts",
    "find_cut_height",
    "find_directions",
    "find_far_groups",
    "find_optimal_bipartition",
    "find_smallest_group",
    "gamma_bound",
    "is_due",
    "is_same_partition",
    "k_means",
    "measure_stability",
    "merge_by_centroids",
    "place_in_branches",
    "require_descriptors",
    "require_updates",
    "route",
    "separation_gap",
    "single_linkage",
    "ternary_similarity",
    "walk_down",
]

if not TYPE_CHECKING:  # a type checker knows the names from the imports above
    __getattr__ = lazy_names(__name__)
