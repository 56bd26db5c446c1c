"""Catalogue: the names of everything that is built in, each with a line of description.

``fedclade ls``, ``--help`` and shell completion need no more than these names. Every other package
may import this package, which imports no other package, so that these commands need not wait for
torch. Registries such as
``fedclade.algorithms.METHODS`` have the implementations, and take the descriptions from here.
"""

from __future__ import annotations

from collections.abc import Mapping

METHODS: Mapping[str, str] = {
    "fedavg": "one model for all clients; FedProx with local.mu > 0",
    "local": "no federation: every client trains only its own model",
    "oracle": "FedAvg within the true clusters, which other methods have to find",
    "cfl": "recursive optimal bi-partition by cosine similarity",
    "rcfl": "clusters tested on replicated updates, with no thresholds to set; fedclade's own",
    "auto": "for each client the best of one model, its cluster's model and own models; fedclade's own",
    "fl_hc": "one step of hierarchical clustering of all updates",
    "fedgroup": "groups clients once, by the directions of their first updates; FedGrouProx with mu > 0",
    "flexcfl": "FedGroup whose clients migrate when their labels shift",
    "ifca": "k models, every client takes the one with the lowest training loss",
    "clove": "k models, clients clustered by the vectors of their losses with all of them",
    "fesem": "k centres, every client goes to the nearest in parameter space",
    "fedsoft": "a model of each client, pulled towards the k centres that fit its examples",
    "feddrift": "a new model where accuracy drops, and a merge of models that agree",
    "fedem": "M shared models, of which every client uses its own mixture",
    "fedrc": "FedEM that does not separate clients by their labels alone",
    "pacfl": "one-shot clusters by principal angles between the clients' data",
    "flux": "clusters once by statistics of the clients' data in a model's latent space",
    "private_choice": "clusters by noisy sums and randomized choices, under differential privacy; fedclade's own",
    "stocfl": "clusters merged if an anchor model's updates on their data are similar",
    "ocfl": "clusters once, by density, when the directions of updates begin to diverge",
    "ditto": "a personal model for each client, kept near a global model",
    "apfl": "each client's model is a mixture of the global model and its own model",
    "pfedme": "personal models near a global model, which moves towards them",
    "per_fedavg": "a global model that performs well after one local step of each client",
    "scaffold": "FedAvg with control variates against client drift",
    "fedper": "FedAvg of all layers except the head, which stays with each client",
    "fedrep": "FedPer whose clients train the head first, then the other layers",
    "lg_fedavg": "FedAvg of the head alone; the other layers stay with each client",
    "fedbn": "FedAvg of all layers except normalisation layers, which stay with each client",
    "fedbuff": "buffered asynchronous rounds on a virtual clock, within clusters",
    "finetune": "FedAvg, after which every client fine-tunes its own copy of the model",
}
"""Built-in algorithms, in the order in which they are listed."""

CREDITS: Mapping[str, str] = {
    "cfl": "Sattler et al. 2019",
    "fl_hc": "Briggs et al. 2020",
    "fedgroup": "Duan et al. 2020",
    "flexcfl": "Duan et al. 2021",
    "ifca": "Ghosh et al. 2020",
    "clove": "Bhatia et al. 2026",
    "fesem": "Xie et al. 2020",
    "fedsoft": "Ruan and Joe-Wong 2022",
    "feddrift": "Jothimurugesan et al. 2023",
    "fedem": "Marfoq et al. 2021",
    "fedrc": "Guo et al. 2024",
    "pacfl": "Vahidian et al. 2023",
    "flux": "Fenoglio et al. 2025",
    "stocfl": "Zeng et al. 2023",
    "ocfl": "Zuziak et al. 2024",
    "ditto": "Li et al. 2021",
    "apfl": "Deng et al. 2020",
    "pfedme": "Dinh et al. 2020",
    "per_fedavg": "Fallah et al. 2020",
    "scaffold": "Karimireddy et al. 2020",
    "fedper": "Arivazhagan et al. 2019",
    "fedrep": "Collins et al. 2021",
    "lg_fedavg": "Liang et al. 2020",
    "fedbn": "Li et al. 2021",
    "fedbuff": "Nguyen et al. 2022",
}
"""Authors and year of the paper that describes an algorithm, if it is exactly one paper."""

CREDITED: Mapping[str, str] = {
    name: f"{line} ({CREDITS[name]})" if name in CREDITS else line for name, line in METHODS.items()
}
"""Descriptions of built-in algorithms, each with its authors and year."""

DATASETS: Mapping[str, str] = {
    "digits": "1,797 handwritten digits, 8×8, bundled with scikit-learn",
    "mnist": "70,000 handwritten digits, 28×28",
    "cifar10": "60,000 colour photographs of 10 things, 32×32",
    "femnist": "handwritten characters by writer, 62 labels, 28×28",
    "ag_news": "news articles on 4 topics: next word, or topic",
    "sent140": "tweets by user: positive or negative",
    "tiny_shakespeare": "Shakespeare's plays by speaker: next word",
    "synthetic": "Synthetic(α, β) of the FedProx and FedGroup papers, made by seed",
}
"""Data sources of fedclade."""

PARTITIONS: Mapping[str, str] = {
    "iid": "shuffled, then cut into equal parts",
    "pathological": "each client has examples of labels_per_client=2 labels only",
    "dirichlet": "each label is spread over the clients by Dirichlet(alpha=0.5)",
    "shards": "sorted by label and cut into shards; shards_per_client=2 each",
    "natural": 'by owner: writer, speaker, user; owners="largest" or "random" ones',
    "quantity_skew": "iid, but for sizes from a power law",
    "power_law": "overlapping runs of labels_per_client=2 labels in log-normal sizes (FedProx)",
    "label_groups": "runs of labels, one for each of the true clusters",
}
"""Divisions of examples among clients."""

SHIFTS: Mapping[str, str] = {
    "none": "every client sees the data as it is",
    "label_swap": "each cluster swaps two labels",
    "label_permutation": "each cluster permutes all labels in its own way",
    "rotation": "each cluster turns its images by another multiple of 90°; up to 4 clusters",
    "invert": "one of two clusters sees images as negatives",
    "blur": "images of cluster j are blurred by j times strength pixels",
    "noise": "images of cluster j have noise of j times strength of the range",
    "colour": "clusters see images in grey, red, green or blue; up to 4",
    "thickness": "strokes of clusters are as they are, wider, narrower; up to 3",
    "anda": "the shifts of FLUX's arena: one of four kinds, at eight levels",
}
"""Differences between the data of true clusters."""

MODELS: Mapping[str, str] = {
    "mclr": "multinomial logistic regression: one dense layer",
    "mlp": "one hidden layer (hidden = 128; FEMNIST in the FedGroup paper: 512)",
    "cnn": "FL+HC's: two 5×5 convolutions (32, 64) with max-pools, dense 512",
    "lenet": "LeNet-5 with average pools, of FLUX and ANDA: 5×5 convolutions (6, 16), dense 120 and 84",
    "cifar_cnn": "five layers: three 3×3 convolutions with max-pools, two dense",
    "lstm": "two-layer LSTM over words: predicts the next one, or classifies the text",
    "vector_lstm": "two-layer LSTM over word vectors: classifies the text (FedGroup's Sent140)",
}
"""Models of fedclade."""

TASKS: Mapping[str, str] = {
    "classification": "one label of several: cross-entropy",
    "binary": "yes or no, from one logit: binary cross-entropy",
    "multilabel": "yes or no for each of several labels: binary cross-entropy",
    "regression": "one number or several: squared error",
    "language": "the next token at each place: cross-entropy",
    "segmentation": "a label of each pixel, some ignored: cross-entropy",
}
"""Built-in tasks."""

ENGINES: Mapping[str, str] = {
    "auto": "the fastest engine for the model, by measurements that are cached",
    "stacked": "all clients in one batched program",
    "workers": "clients in parallel, in one process for each core (CPU, Linux)",
    "vmap": "all clients by torch.func.vmap",
    "loop": "one client after another",
}
"""Names of all engines that run on this machine."""

REMOTE: Mapping[str, str] = {
    "ray": "clients on the actors of a Ray cluster, each with an engine of its own"
}
"""Names of engines that train in other processes or on other machines."""

TRACKERS: Mapping[str, str] = {
    "tensorboard": "Tracker that writes every round to event files of TensorBoard",
    "mlflow": "Tracker that writes every round to MLflow",
    "wandb": "Tracker that writes every round to Weights & Biases",
}
"""Services that log a run, as the option ``--log`` names them."""

__all__ = [
    "CREDITED",
    "CREDITS",
    "DATASETS",
    "ENGINES",
    "METHODS",
    "MODELS",
    "PARTITIONS",
    "REMOTE",
    "SHIFTS",
    "TASKS",
    "TRACKERS",
]
