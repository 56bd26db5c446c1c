"""BibTeX entries for what people use."""

from __future__ import annotations

from collections.abc import Mapping

from fedclade.core import (
    ConfigError,
    unknown,
)

_CFL = """@article{sattler2021cfl,
  author  = {Felix Sattler and Klaus-Robert M{\\"u}ller and Wojciech Samek},
  title   = {Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization Under Privacy Constraints},
  journal = {IEEE Transactions on Neural Networks and Learning Systems},
  volume  = {32},
  number  = {8},
  pages   = {3710--3722},
  year    = {2021},
  note    = {arXiv:1910.01991}
}"""
_FEDAVG = """@inproceedings{mcmahan2017fedavg,
  author    = {Brendan McMahan and Eider Moore and Daniel Ramage and Seth Hampson and Blaise {Ag{\\"u}era y Arcas}},
  title     = {Communication-Efficient Learning of Deep Networks from Decentralized Data},
  booktitle = {Artificial Intelligence and Statistics (AISTATS)},
  year      = {2017},
  note      = {arXiv:1602.05629}
}"""
_FEDPROX = """@inproceedings{li2020fedprox,
  author    = {Tian Li and Anit Kumar Sahu and Manzil Zaheer and Maziar Sanjabi and Ameet Talwalkar and Virginia Smith},
  title     = {Federated Optimization in Heterogeneous Networks},
  booktitle = {Machine Learning and Systems (MLSys)},
  year      = {2020},
  note      = {arXiv:1812.06127}
}"""
_FLHC = """@inproceedings{briggs2020flhc,
  author    = {Christopher Briggs and Zhong Fan and Peter Andras},
  title     = {Federated Learning with Hierarchical Clustering of Local Updates to Improve Training on Non-{IID} Data},
  booktitle = {International Joint Conference on Neural Networks (IJCNN)},
  year      = {2020},
  note      = {arXiv:2004.11791}
}"""
_FEDGROUP = """@misc{duan2020fedgroup,
  author = {Moming Duan and Duo Liu and Xinyuan Ji and Renping Liu and Liang Liang and Xianzhang Chen and Yujuan Tan},
  title  = {{FedGroup}: Efficient Clustered Federated Learning via Decomposed Data-Driven Measure},
  year   = {2020},
  note   = {arXiv:2010.06870}
}"""
_IFCA = """@inproceedings{ghosh2020ifca,
  author    = {Avishek Ghosh and Jichan Chung and Dong Yin and Kannan Ramchandran},
  title     = {An Efficient Framework for Clustered Federated Learning},
  booktitle = {Advances in Neural Information Processing Systems (NeurIPS)},
  year      = {2020},
  note      = {arXiv:2006.04088}
}"""
_FESEM = """@misc{xie2020fesem,
  author = {Ming Xie and Guodong Long and Tao Shen and Tianyi Zhou and Xianzhi Wang and Jing Jiang and Chengqi Zhang},
  title  = {Multi-Center Federated Learning},
  year   = {2020},
  note   = {arXiv:2005.01026}
}"""
_PACFL = """@inproceedings{vahidian2023pacfl,
  author    = {Saeed Vahidian and Mahdi Morafah and Weijia Wang and Vyacheslav Kungurtsev and Chen Chen and Mubarak Shah
               and Bill Lin},
  title     = {Efficient Distribution Similarity Identification in Clustered Federated Learning via Principal Angles
               between Client Data Subspaces},
  booktitle = {AAAI Conference on Artificial Intelligence},
  year      = {2023},
  note      = {arXiv:2209.10526}
}"""
_DITTO = """@inproceedings{li2021ditto,
  author    = {Tian Li and Shengyuan Hu and Ahmad Beirami and Virginia Smith},
  title     = {Ditto: Fair and Robust Federated Learning Through Personalization},
  booktitle = {International Conference on Machine Learning (ICML)},
  year      = {2021},
  note      = {arXiv:2012.04221}
}"""
_LEAF = """@misc{caldas2018leaf,
  author = {Sebastian Caldas and Sai Meher Karthik Duddu and Peter Wu and Tian Li and Jakub Kone{\\v{c}}n{\\'y}
            and H. Brendan McMahan and Virginia Smith and Ameet Talwalkar},
  title  = {{LEAF}: A Benchmark for Federated Settings},
  year   = {2018},
  note   = {arXiv:1812.01097}
}"""
_MNIST = """@article{lecun1998mnist,
  author  = {Yann LeCun and L{\\'e}on Bottou and Yoshua Bengio and Patrick Haffner},
  title   = {Gradient-Based Learning Applied to Document Recognition},
  journal = {Proceedings of the IEEE},
  volume  = {86},
  number  = {11},
  pages   = {2278--2324},
  year    = {1998}
}"""
_CIFAR = """@techreport{krizhevsky2009cifar,
  author      = {Alex Krizhevsky},
  title       = {Learning Multiple Layers of Features from Tiny Images},
  institution = {University of Toronto},
  year        = {2009}
}"""
_AG_NEWS = """@inproceedings{zhang2015agnews,
  author    = {Xiang Zhang and Junbo Zhao and Yann LeCun},
  title     = {Character-level Convolutional Networks for Text Classification},
  booktitle = {Advances in Neural Information Processing Systems (NIPS)},
  year      = {2015},
  note      = {arXiv:1509.01626}
}"""
_SENT140 = """@techreport{go2009sent140,
  author      = {Alec Go and Richa Bhayani and Lei Huang},
  title       = {Twitter Sentiment Classification using Distant Supervision},
  institution = {Stanford University},
  year        = {2009}
}"""
_SHAKESPEARE = """@misc{karpathy2015charrnn,
  author       = {Andrej Karpathy},
  title        = {char-rnn},
  year         = {2015},
  howpublished = {GitHub repository karpathy/char-rnn}
}"""
_DIGITS = """@misc{alpaydin1998digits,
  author       = {E. Alpaydin and C. Kaynak},
  title        = {Optical Recognition of Handwritten Digits},
  year         = {1998},
  howpublished = {UCI Machine Learning Repository}
}"""
_FEDCLADE = """@software{fedclade,
  author = {{The fedclade developers}},
  title  = {fedclade: clustered federated learning},
  year   = {2026}
}"""

CITATIONS: Mapping[str, str] = {
    "fedclade": _FEDCLADE,
    "cfl": _CFL,
    "rcfl": _FEDCLADE + "\n\n" + _CFL,
    "fl_hc": _FLHC,
    "fedavg": _FEDAVG,
    "fedprox": _FEDPROX,
    "fedgroup": _FEDGROUP,
    "finetune": _FEDAVG,
    "ifca": _IFCA,
    "fesem": _FESEM,
    "pacfl": _PACFL,
    "ditto": _DITTO,
    "digits": _DIGITS,
    "mnist": _MNIST,
    "cifar10": _CIFAR,
    "ag_news": _AG_NEWS,
    "tiny_shakespeare": _SHAKESPEARE,
    "femnist": _LEAF,
    "sent140": _SENT140 + "\n\n" + _LEAF,
    "synthetic": _FEDPROX + "\n\n" + _FEDGROUP,
    "label_swap": _CFL,
    "label_permutation": _CFL,
    "pathological": _FEDAVG,
    "shards": _FEDAVG,
    "mlp": _FEDAVG,
    "cnn": _FLHC,
    "cifar_cnn": _CFL,
}
"""By what is used: the entry of the paper that it comes from."""


def cite_name(name: str) -> str:
    """Return the BibTeX of an algorithm, data set, partition, shift or model.

    Raises
    ------
    ConfigError
        If there is no entry of that name.
    """
    if name not in CITATIONS:
        raise ConfigError(unknown("name to cite", name, CITATIONS))
    return CITATIONS[name]
