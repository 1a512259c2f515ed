"""Define a masked autoencoder (He et al. 2022) as an objective of pre-training: from a quarter of the tokens
it predicts the signal of the other tokens.
`omnilead pretrain --config cmsc --set objective.method=mae.py:Mae ...`
"""

import torch
from torch import nn

from omnilead.engine.model.draws import uniform


class Mae(nn.Module):
    # The encoder sees `share` of the tokens. A token stands for `samples` samples of every lead
    def __init__(self, encoder, share=0.25, width=64, leads=12, samples=16):
        super().__init__()
        self.share, self.samples = share, samples
        self.enter, self.leave = nn.Linear(encoder.width, width), nn.Linear(width, leads * samples)
        self.hidden, self.place = nn.Parameter(torch.zeros(width)), nn.Embedding(1024, width)
        self.decoder = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, batch_first=True
        )

    def forward(self, encoder, x_BSLT, keys_BS):
        x_RLT = x_BSLT.flatten(0, 1)
        z_RNF, _ = encoder.features(x_RLT)
        rows, tokens, _ = z_RNF.shape
        order_RN = uniform(keys_BS.flatten(), tokens).argsort(1)
        keep_RK = order_RN[:, : int(self.share * tokens)]
        seen_RKW = self.enter(encoder.context(z_RNF, None, keep_RK))
        at_RKW = keep_RK[..., None].expand_as(seen_RKW)
        y_RNW = self.hidden.expand(rows, tokens, -1).scatter(1, at_RKW, seen_RKW)
        made_RNQ = self.leave(self.decoder(y_RNW + self.place.weight[:tokens])).float()
        patches_RLNS = x_RLT.unfold(2, self.samples, self.samples)[:, :, :tokens]
        patches_RNQ = patches_RLNS.transpose(1, 2).flatten(2).float()
        error_RN = (made_RNQ - patches_RNQ).square().mean(2)
        return error_RN.scatter(1, keep_RK, 0.0).sum() / (rows * (tokens - keep_RK.shape[1]))
