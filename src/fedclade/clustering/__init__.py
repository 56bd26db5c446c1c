"""From signatures to clusters.

Similarity, bi-partition, linkage, EDC, subspace angles, the split-half test, criteria, and routing. Functions of
tensors and trees, without a run and without clients, except for the routing of newcomers, which asks them.
Algorithms, runs and reports import it; it imports :mod:`fedclade.core` alone.
"""

from fedclade.clustering.bipartition import optimal_bipartition
from fedclade.clustering.criteria import MOST_PAIRED, SplitCriteria
from fedclade.clustering.descriptors import (
    DescriptorSpace,
    apart,
    described,
    epsilon_by_knee,
    to_nearest_descriptor,
    without_labels,
)
from fedclade.clustering.far_branches import FarGroup, far_groups
from fedclade.clustering.linkage import (
    CENTROID,
    LINKAGES,
    Merges,
    agglomerate,
    centroid_linkage,
    cut,
    cut_height,
    n_clusters_by_gap,
    where_to_cut,
)
from fedclade.clustering.part_similarity import (
    VIEWS,
    client_similarity,
    gain_by_parts,
    gammas_of,
    noise_of,
    part_similarity,
    views_of,
)
from fedclade.clustering.part_test import PartFinding, find_by_parts, lowest_p_value, parts_for
from fedclade.clustering.private_centres import cell_points, centres_of_cells, directions
from fedclade.clustering.routing import (
    Assignment,
    LossEstimate,
    Step,
    all_of,
    estimate_by_loss,
    fits_by_loss,
    leaf_losses,
    placed,
    route,
    to_lowest_loss,
    to_root,
    training_losses,
    walk_down,
)
from fedclade.clustering.sampling import to_nearest_mean
from fedclade.clustering.separation import gamma_bound, highest_cross, lowest_intra, separation_gap
from fedclade.clustering.similarity import (
    METRICS,
    Distances,
    Labels,
    Similarity,
    are_signs,
    cosine_similarity,
    cosines,
    distances,
    from_signs,
)
from fedclade.clustering.spanning_tree import single_linkage
from fedclade.clustering.split_half import Finding, Replicates, find_clusters, gain, same_partition
from fedclade.clustering.subspace_angles import angles, nearest_vectors
from fedclade.clustering.ternary import Points, k_means, ternary_similarity

__all__ = [
    "CENTROID",
    "LINKAGES",
    "METRICS",
    "MOST_PAIRED",
    "VIEWS",
    "Assignment",
    "DescriptorSpace",
    "Distances",
    "FarGroup",
    "Finding",
    "Labels",
    "LossEstimate",
    "Merges",
    "PartFinding",
    "Points",
    "Replicates",
    "Similarity",
    "SplitCriteria",
    "Step",
    "agglomerate",
    "all_of",
    "angles",
    "apart",
    "are_signs",
    "cell_points",
    "centres_of_cells",
    "centroid_linkage",
    "client_similarity",
    "cosine_similarity",
    "cosines",
    "cut",
    "cut_height",
    "described",
    "directions",
    "distances",
    "epsilon_by_knee",
    "estimate_by_loss",
    "far_groups",
    "find_by_parts",
    "find_clusters",
    "fits_by_loss",
    "from_signs",
    "gain",
    "gain_by_parts",
    "gamma_bound",
    "gammas_of",
    "highest_cross",
    "k_means",
    "leaf_losses",
    "lowest_intra",
    "lowest_p_value",
    "n_clusters_by_gap",
    "nearest_vectors",
    "noise_of",
    "optimal_bipartition",
    "part_similarity",
    "parts_for",
    "placed",
    "route",
    "same_partition",
    "separation_gap",
    "single_linkage",
    "ternary_similarity",
    "to_lowest_loss",
    "to_nearest_descriptor",
    "to_nearest_mean",
    "to_root",
    "training_losses",
    "views_of",
    "walk_down",
    "where_to_cut",
    "without_labels",
]
