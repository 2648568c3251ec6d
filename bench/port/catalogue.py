"""What both frameworks do where they are known to differ: the texts of docs/differences.md.

Keys are those of `causes.CATALOGUE`, which holds what `twinbench port` answers in one line; here
stands what a reader looks up. `python -m bench.docs.differences` makes the page of both.
"""

from __future__ import annotations

from msgspec import Struct


class Entry(Struct, frozen=True, kw_only=True):
    """Where the frameworks differ.

    pytorch, tensorflow: what they do. why: why they differ. in_pytorch, in_tensorflow: the line
    that makes this side do as the other. defaults: a parameter, as "torch.nn.LayerNorm(eps)", and
    its default.
    """

    pytorch: str
    tensorflow: str
    why: str
    in_pytorch: str
    in_tensorflow: str
    defaults: dict[str, object] = {}


CONVOLUTIONS = {
    "padding": Entry(
        pytorch="`padding=1` puts one row before and one after: zeros for a convolution, -inf for "
        "`MaxPool2d`. `padding='same'` is refused with a stride.",
        tensorflow="`padding='same'` gives `ceil(size / stride)` outputs. It pads as little as "
        "that needs, and an odd row goes after the image: a kernel of 3 with stride 2 on an even "
        "size has none before and one after.",
        why="PyTorch's padding depends on the layer only, TensorFlow's on the size of the image, "
        "too. Shapes agree, so that nothing fails, and every output is computed from a window that "
        "is shifted by a pixel. On odd sizes both agree. `ZeroPadding2D` before a max pooling is "
        "right only where no input is negative, as after a ReLU.",
        in_pytorch="`x = F.pad(x, (0, 1, 0, 1))`, then `nn.Conv2d(i, o, 3, stride=2)`; before a "
        "`MaxPool2d` with `value=-math.inf`",
        in_tensorflow="`x = layers.ZeroPadding2D(1)(x)`, then "
        "`layers.Conv2D(o, 3, strides=2, padding='valid')`; before a `MaxPooling2D` "
        "`keras.ops.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)], constant_values=-math.inf)`",
        defaults={
            "torch.nn.Conv2d(padding)": 0,
            "torch.nn.MaxPool2d(padding)": 0,
            "keras.layers.Conv2D(padding)": "valid",
            "keras.layers.MaxPooling2D(padding)": "valid",
        },
    ),
    "pool_padding_counted": Entry(
        pytorch="`AvgPool2d` divides by the size of the window, so padded zeros count.",
        tensorflow="`AveragePooling2D(padding='same')` divides by the number of real pixels.",
        why="PyTorch has a switch for it, whose default is that of Caffe; TensorFlow has none.",
        in_pytorch="`nn.AvgPool2d(3, padding=1, count_include_pad=False)`",
        in_tensorflow="`x = layers.ZeroPadding2D(1)(x)`, then "
        "`layers.AveragePooling2D(3, padding='valid')`",
        defaults={"torch.nn.AvgPool2d(count_include_pad)": True},
    ),
    "ceil_mode": Entry(
        pytorch="A window that the image covers in part is left out, unless `ceil_mode=True`.",
        tensorflow="`padding='valid'` leaves it out, `padding='same'` takes it.",
        why="On sizes that the stride does not divide this decides over the shape; behind a global "
        "pooling the shape does not show it.",
        in_pytorch="`nn.MaxPool2d(2, ceil_mode=True)`",
        in_tensorflow="`layers.MaxPooling2D(2, padding='valid')`",
        defaults={"torch.nn.MaxPool2d(ceil_mode)": False},
    ),
    "transposed_padding": Entry(
        pytorch="`ConvTranspose2d(3, stride=2, padding=1, output_padding=1)` crops one row before "
        "the image and none after it.",
        tensorflow="`Conv2DTranspose(3, strides=2, padding='same')` crops none before and one "
        "after.",
        why="Each undoes the padding of its framework's strided convolution. The results are the "
        "same image, shifted by a pixel.",
        in_pytorch="`nn.ConvTranspose2d(i, o, 3, stride=2)`, then `x[..., :-1, :-1]`",
        in_tensorflow="`layers.Conv2DTranspose(o, 3, strides=2, padding='valid')`, then "
        "`layers.Cropping2D(((1, 0), (1, 0)))`",
    ),
    "stride_place": Entry(
        pytorch="torchvision's ResNet-50 has it in the 3x3 convolution (version 1.5).",
        tensorflow="`keras.applications.ResNet50` has it in the first 1x1 convolution (version 1, "
        "as the article).",
        why="Both are called ResNet-50, and their weights have the same shapes. Version 1.5 "
        "reads every pixel, takes more operations and is somewhat more accurate.",
        in_pytorch="`block.conv1.stride, block.conv2.stride = block.conv2.stride, (1, 1)`",
        in_tensorflow="write the block anew, with `strides=2` in its 3x3 convolution",
    ),
    "data_format": Entry(
        pytorch="Images are (batch, channels, height, width).",
        tensorflow="Images are (batch, height, width, channels).",
        why="cuDNN's first layout was channels first; TensorFlow's kernels on CPUs, and tensor "
        "cores, prefer channels last. PyTorch's `channels_last` changes only the order in memory, "
        "not the shape. Where height, width and channels are equal nothing fails, and the axes "
        "are confused.",
        in_pytorch="`x = x.permute(0, 3, 1, 2)`",
        in_tensorflow="`x = keras.ops.transpose(x, (0, 2, 3, 1))`",
    ),
}

SHAPES = {
    "flatten_order": Entry(
        pytorch="`torch.flatten(x, 1)` of (channels, height, width): all pixels of the first "
        "channel come first.",
        tensorflow="`Flatten()` of (height, width, channels): all channels of the first pixel "
        "come first.",
        why="It follows from where the channels lie. The dense layer behind has weights of the "
        "same shape in both, so that copied weights fit and mean something else.",
        in_pytorch="`x = x.permute(0, 2, 3, 1).flatten(1)`",
        in_tensorflow="`x = layers.Permute((3, 1, 2))(x)`, then `layers.Flatten()(x)`",
    ),
    "reshape_order": Entry(
        pytorch="`x.reshape(batch, size, -1)` of channels-first data keeps channels apart.",
        tensorflow="`Reshape((size, -1))` of channels-last data mixes channels and pixels.",
        why="Both read in the order of memory, but the axes lie otherwise. A reshape that splits "
        "or joins axes needs a transposition where the axes differ. So do heads of attention: "
        "`(heads, size)` and `(size, heads)` have as many numbers.",
        in_pytorch="`x = x.permute(0, 2, 3, 1).reshape(batch, -1, channels)`",
        in_tensorflow="`x = layers.Permute((3, 1, 2))(x)`, then `layers.Reshape(...)(x)`",
    ),
    "softmax_axis": Entry(
        pytorch="`Softmax(dim)` has to be told; channels are axis 1.",
        tensorflow="`Softmax()` is over the last axis, which channels are.",
        why="What is `dim=1` of channels-first data is `axis=-1` of channels-last data. Copied as "
        "a number it is another axis, of a result that still adds up to 1.",
        in_pytorch="`torch.softmax(x, dim=-1)`",
        in_tensorflow="`keras.ops.softmax(x, axis=1)`",
        defaults={
            "torch.nn.Softmax(dim)": None,
            "keras.layers.Softmax(axis)": -1,
        },
    ),
}

NORMALIZATION = {
    "norm_epsilon": Entry(
        pytorch="Every normalisation adds 1e-5 to the variance.",
        tensorflow="Every normalisation adds 1e-3.",
        why="Keras chose its value for half precision. The difference is small where variances "
        "are near 1, and large where they are small: behind weights that are small, or in "
        "channels that are nearly dead. Some model collections have a third value.",
        in_pytorch="`nn.BatchNorm2d(n, eps=1e-3)`, `nn.LayerNorm(n, eps=1e-3)`",
        in_tensorflow="`layers.BatchNormalization(epsilon=1e-5)`, "
        "`layers.LayerNormalization(epsilon=1e-5)`",
        defaults={
            "torch.nn.BatchNorm2d(eps)": 1e-5,
            "torch.nn.LayerNorm(eps)": 1e-5,
            "torch.nn.GroupNorm(eps)": 1e-5,
            "keras.layers.BatchNormalization(epsilon)": 1e-3,
            "keras.layers.LayerNormalization(epsilon)": 1e-3,
            "keras.layers.GroupNormalization(epsilon)": 1e-3,
        },
    ),
    "norm_momentum": Entry(
        pytorch="`momentum` is the share of the new statistics.",
        tensorflow="`momentum` is the share of the old ones.",
        why="The same word has two meanings, and the defaults differ, too: the running statistics "
        "of PyTorch follow ten batches, those of Keras a hundred. A number that is copied as it "
        "stands turns slow into fast. It shows only in evaluation after training.",
        in_pytorch="`nn.BatchNorm2d(n, momentum=0.01)`",
        in_tensorflow="`layers.BatchNormalization(momentum=0.9)`",
        defaults={
            "torch.nn.BatchNorm2d(momentum)": 0.1,
            "keras.layers.BatchNormalization(momentum)": 0.99,
        },
    ),
    "running_variance": Entry(
        pytorch="A batch is normalised with its biased variance (divided by n). The running "
        "variance is updated with the unbiased one (divided by n - 1).",
        tensorflow="Keras 3 uses the biased one for both.",
        why="n is the number of values of a channel: batch times pixels. Of images it is large, "
        "and the difference small; behind dense layers or on last, small feature maps it is the "
        "batch. TensorFlow's fused kernel of Keras 2 did as PyTorch.",
        in_pytorch="after the forward pass: `kept = (1 - norm.momentum) * before`, then "
        "`norm.running_var.copy_(kept + (norm.running_var - kept) * (n - 1) / n)`",
        in_tensorflow="after the call: `kept = norm.momentum * before`, then "
        "`norm.moving_variance.assign(kept + (norm.moving_variance - kept) * n / (n - 1))`",
    ),
    "norm_frozen": Entry(
        pytorch="`requires_grad = False` keeps scale and shift as they are. In training mode the "
        "layer still normalises with the batch and updates its running statistics.",
        tensorflow="`trainable = False` makes the layer run in inference mode: it uses and keeps "
        "its moving statistics.",
        why="In PyTorch training mode and gradients are two switches; Keras joined them for "
        "BatchNorm, since fine-tuning with a frozen base nearly always means both.",
        in_pytorch="`norm.eval()` after each `model.train()`",
        in_tensorflow="`layer.trainable = True`, and leave its weights out of the optimizer",
    ),
}

ACTIVATIONS = {
    "gelu": Entry(
        pytorch="`nn.GELU()` is exact, by the error function; `approximate='tanh'` is the other.",
        tensorflow="`keras.activations.gelu` and `tf.nn.gelu` are exact; `approximate=True` is the "
        "tanh form.",
        why="The defaults agree. Models do not: GPT-2 and the original BERT used the tanh form, "
        "others the exact one, and collections follow their origin. Values differ by some 5e-4 at "
        "most, gradients by more.",
        in_pytorch="`nn.GELU(approximate='tanh')`",
        in_tensorflow="`layers.Activation(lambda x: keras.activations.gelu(x, approximate=False))`",
        defaults={
            "torch.nn.GELU(approximate)": "none",
            "keras.activations.gelu(approximate)": False,
            "tensorflow.nn.gelu(approximate)": False,
        },
    ),
    "negative_slope": Entry(
        pytorch="The slope of negative inputs is 0.01.",
        tensorflow="That of the layer is 0.3, that of the functions 0.2.",
        why="Each default comes from another article or example. Write the slope down.",
        in_pytorch="`nn.LeakyReLU(0.3)`",
        in_tensorflow="`layers.LeakyReLU(negative_slope=0.01)`",
        defaults={
            "torch.nn.LeakyReLU(negative_slope)": 0.01,
            "keras.layers.LeakyReLU(negative_slope)": 0.3,
            "keras.activations.leaky_relu(negative_slope)": 0.2,
            "tensorflow.nn.leaky_relu(alpha)": 0.2,
        },
    ),
    "activation": Entry(
        pytorch="An activation is a layer or a call behind the layer.",
        tensorflow="Layers have an argument `activation`, which is None unless it is given.",
        why="One that is forgotten, or written as another, changes no shape and no weight. A "
        "model that is written once more is the usual place of it.",
        in_pytorch="the activation that the other side has",
        in_tensorflow="the activation that the other side has",
        defaults={"keras.layers.Dense(activation)": None},
    ),
}

RECURRENT = {
    "recurrent_gates": Entry(
        pytorch="GRU: reset, update, new. LSTM: input, forget, cell, output.",
        tensorflow="GRU: update, reset, new. LSTM: input, forget, cell, output.",
        why="The gates of a layer lie in one matrix. Their order is a convention, and in GRU the "
        "conventions differ. Shapes are the same, so that weights copied without reordering fit.",
        in_pytorch="`r, z, n = weight.chunk(3)`, then `torch.cat((z, r, n))` for Keras",
        in_tensorflow="`z, r, n = numpy.split(kernel, 3, axis=1)`, then "
        "`numpy.concatenate((r, z, n), axis=1)` for PyTorch",
    ),
    "gru_reset": Entry(
        pytorch="The reset gate multiplies the state after its matrix product, bias included.",
        tensorflow="`reset_after=True` does the same. `reset_after=False` multiplies the state "
        "before the product, as the first article does, and has one bias instead of two.",
        why="After the product all matrix products of a step are one, which cuDNN needs. Models "
        "from before TensorFlow 2 have the other form. PyTorch has no switch.",
        in_pytorch="a cell that is written by hand",
        in_tensorflow="`layers.GRU(units, reset_after=True)`",
        defaults={"keras.layers.GRU(reset_after)": True},
    ),
    "recurrent_bias": Entry(
        pytorch="LSTM and GRU have two biases, `bias_ih` and `bias_hh`.",
        tensorflow="LSTM has one. GRU with `reset_after=True` keeps two, as the rows of one array.",
        why="cuDNN has two. In an LSTM only their sum matters; in a GRU the second one of the new "
        "gate is reset with the state. As two parameters they also get twice the update.",
        in_pytorch="`bias_hh` zero, and `requires_grad_(False)`",
        in_tensorflow="`bias_ih + bias_hh` for an LSTM, `numpy.stack((bias_ih, bias_hh))` for a "
        "GRU",
    ),
    "forget_bias": Entry(
        pytorch="Biases of an LSTM are drawn like its weights.",
        tensorflow="`unit_forget_bias=True` starts the forget gate's bias at 1, the others at 0.",
        why="A gate that starts open lets gradients pass through time (Jozefowicz et al., 2015). "
        "Keras made it the default. Some cells of TensorFlow 1 added the 1 at each step instead, "
        "so that it is in no weight.",
        in_pytorch="`bias_ih[hidden:2 * hidden] = 1` and `bias_hh[hidden:2 * hidden] = 0`",
        in_tensorflow="`layers.LSTM(units, unit_forget_bias=False)`",
        defaults={"keras.layers.LSTM(unit_forget_bias)": True},
    ),
    "batch_first": Entry(
        pytorch="`nn.LSTM`, `nn.GRU` and `nn.MultiheadAttention` take (time, batch, features) "
        "unless `batch_first=True`.",
        tensorflow="Sequences are always (batch, time, features).",
        why="Time first is the order of cuDNN. An array of the other order is read without an "
        "error: samples become steps of time.",
        in_pytorch="`nn.LSTM(i, o, batch_first=True)`",
        in_tensorflow="`keras.ops.transpose(x, (1, 0, 2))` before the layer and after it",
        defaults={
            "torch.nn.RNNBase(batch_first)": False,
            "torch.nn.MultiheadAttention(batch_first)": False,
        },
    ),
    "recurrent_last": Entry(
        pytorch="`out[:, -1]` of a bidirectional layer has the backward direction's first step.",
        tensorflow="`Bidirectional` without `return_sequences` gives the last step of either; of "
        "the backward direction that is the first token's.",
        why="PyTorch gives outputs in the order of time, and the states after the last step in "
        "`h_n`.",
        in_pytorch="`torch.cat((h_n[-2], h_n[-1]), 1)`",
        in_tensorflow="`return_sequences=True`, then `x[:, -1]`",
        defaults={"keras.layers.LSTM(return_sequences)": False},
    ),
    "recurrent_activation": Entry(
        pytorch="LSTM and GRU have sigmoid for the gates, tanh for the rest, and no argument.",
        tensorflow="`activation` and `recurrent_activation` take any function.",
        why="Models from before TensorFlow 2 have a hard sigmoid. cuDNN has only PyTorch's.",
        in_pytorch="a cell that is written by hand",
        in_tensorflow="`layers.LSTM(units, activation='tanh', recurrent_activation='sigmoid')`",
        defaults={
            "keras.layers.LSTM(activation)": "tanh",
            "keras.layers.LSTM(recurrent_activation)": "sigmoid",
        },
    ),
    "mask": Entry(
        pytorch="A recurrent layer runs over padding unless it is given a packed sequence; "
        "attention needs a `key_padding_mask`.",
        tensorflow="`Embedding(mask_zero=True)` and `Masking` make a mask that travels with the "
        "data: recurrent layers skip masked steps, attention and losses leave them out.",
        why="Keras carries the mask in silence, PyTorch carries nothing. A layer of the user's "
        "that does not pass the mask on ends it, without an error.",
        in_pytorch="`pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)`",
        in_tensorflow="`layers.Embedding(words, size, mask_zero=True)`",
        defaults={"keras.layers.Embedding(mask_zero)": False},
    ),
    "padding_token": Entry(
        pytorch="`padding_idx=0` starts the row at zero and gives it no gradient.",
        tensorflow="`mask_zero=True` only makes a mask. The row is drawn as any other, and is "
        "updated where no mask keeps its gradient out.",
        why="They look like the same switch and do different things.",
        in_pytorch="`nn.Embedding(words, size)` without `padding_idx`",
        in_tensorflow="multiply the embedding by `keras.ops.cast(tokens != 0, x.dtype)[..., None]`",
        defaults={"torch.nn.Embedding(padding_idx)": None},
    ),
}

DROPOUT = {
    "dropout_rate": Entry(
        pytorch="`Dropout(p)` drops a share of p.",
        tensorflow="`Dropout(rate)` drops a share of rate. `tf.compat.v1.nn.dropout` had the share "
        "that is kept.",
        why="Today both mean the same. Code from TensorFlow 1 has `keep_prob`, and 0.9 copied as "
        "it stands drops nearly everything. Values that are kept grow by 1 / (1 - rate) in both.",
        in_pytorch="`nn.Dropout(1 - keep_prob)`",
        in_tensorflow="`layers.Dropout(1 - keep_prob)`",
        defaults={"torch.nn.Dropout(p)": 0.5},
    ),
    "dropout_shape": Entry(
        pytorch="`Dropout2d` drops whole channels.",
        tensorflow="`SpatialDropout2D` drops whole channels; `Dropout(noise_shape=...)` what it "
        "is told.",
        why="The names differ, and `Dropout` exists in both. Mean and rate agree; the variance of "
        "what comes out does not.",
        in_pytorch="`nn.Dropout2d(p)`",
        in_tensorflow="`layers.SpatialDropout2D(rate)`",
    ),
    "dropout_missing": Entry(
        pytorch="A layer of dropout, or the argument of `nn.LSTM`, `nn.TransformerEncoderLayer` "
        "and `nn.MultiheadAttention`.",
        tensorflow="A layer of dropout, or the argument of `LSTM` and `MultiHeadAttention`.",
        why="`TransformerEncoderLayer` drops 0.1 without being asked, and at four places.",
        in_pytorch="`nn.TransformerEncoderLayer(size, heads, dropout=0.0)`",
        in_tensorflow="`layers.MultiHeadAttention(heads, size, dropout=0.1)`",
        defaults={
            "torch.nn.TransformerEncoderLayer(dropout)": 0.1,
            "torch.nn.MultiheadAttention(dropout)": 0.0,
            "keras.layers.MultiHeadAttention(dropout)": 0.0,
        },
    ),
    "recurrent_dropout": Entry(
        pytorch="`LSTM(dropout=p)` drops what each layer but the last gives, with a new mask for "
        "each time step.",
        tensorflow="`LSTM(dropout=rate)` drops what the layer is given, the first included, with "
        "one mask for all time steps. `recurrent_dropout` drops the state, which PyTorch's cannot.",
        why="Keras follows Gal and Ghahramani (2016), whose mask is fixed in time; PyTorch does "
        "what cuDNN does.",
        in_pytorch="single-layer LSTMs, and before each a mask `torch.empty(batch, 1, "
        "size).bernoulli_(1 - p) / (1 - p)`",
        in_tensorflow="`layers.LSTM(units)` without it, and `layers.Dropout(rate)` between the "
        "layers",
        defaults={
            "torch.nn.RNNBase(dropout)": 0.0,
            "keras.layers.LSTM(dropout)": 0.0,
            "keras.layers.LSTM(recurrent_dropout)": 0.0,
        },
    ),
}

ATTENTION = {
    "attention_scale": Entry(
        pytorch="`scaled_dot_product_attention` divides scores by the root of a head's size.",
        tensorflow="`MultiHeadAttention` does, too. `Attention` and `AdditiveAttention`, which are "
        "older, do not scale.",
        why="`layers.Attention` is Luong's attention (2015), written before transformers.",
        in_pytorch="`F.scaled_dot_product_attention(q, k, v, scale=1.0)`",
        in_tensorflow="`q = q / math.sqrt(head_size)` before `layers.Attention()`",
        defaults={"keras.layers.Attention(use_scale)": False},
    ),
    "attention_mask": Entry(
        pytorch="In `key_padding_mask` and `attn_mask` of `MultiheadAttention` True is left out; "
        "in `scaled_dot_product_attention` True takes part.",
        tensorflow="In `attention_mask` True takes part.",
        why="PyTorch's module is older than its function, and the two disagree.",
        in_pytorch="`key_padding_mask=~mask`",
        in_tensorflow="`attention_mask=~mask`",
    ),
    "causal": Entry(
        pytorch="`is_causal=True` of `scaled_dot_product_attention`; `MultiheadAttention` wants "
        "`attn_mask`, too.",
        tensorflow="`use_causal_mask=True` when `MultiHeadAttention` is called.",
        why="In both it is an argument of the call, and absent unless it is given. A language "
        "model without it learns to copy, and its loss falls to near zero.",
        in_pytorch="`F.scaled_dot_product_attention(q, k, v, is_causal=True)`",
        in_tensorflow="`attention(x, x, use_causal_mask=True)`",
    ),
    "missing_residual": Entry(
        pytorch="`x + block(x)` in the forward pass.",
        tensorflow="`layers.Add()([x, block(x)])`.",
        why="A sum has no weights, so that nothing misses it when weights are copied.",
        in_pytorch="`return x + y`",
        in_tensorflow="`layers.Add()([x, y])`",
    ),
}

IMAGES = {
    "interpolation": Entry(
        pytorch="`Upsample` repeats the nearest pixel unless `mode` says otherwise. "
        "`align_corners=False` takes pixels as squares; True puts the outermost centres onto each "
        "other.",
        tensorflow="`UpSampling2D` repeats the nearest pixel, too; `tf.image.resize` and "
        "`layers.Resizing` are bilinear. Pixels are squares; TensorFlow 1 had another default.",
        why="An upsampling has no weights, and all modes give the same shape. Older models and "
        "articles on segmentation align corners. Where sizes are no multiples, PyTorch's "
        "`'nearest'` takes the left pixel and Keras the nearest one; the bicubic kernels have "
        "other constants (-0.75 and -0.5).",
        in_pytorch="`F.interpolate(x, scale_factor=2, mode='bilinear', align_corners=False)`",
        in_tensorflow="`layers.UpSampling2D(2, interpolation='bilinear')`; with aligned corners "
        "`tf.compat.v1.image.resize_bilinear(x, size, align_corners=True)`",
        defaults={
            "torch.nn.Upsample(mode)": "nearest",
            "torch.nn.Upsample(align_corners)": None,
            "keras.layers.UpSampling2D(interpolation)": "nearest",
            "keras.layers.Resizing(interpolation)": "bilinear",
        },
    ),
    "preprocessing": Entry(
        pytorch="torchvision's models expect images that were scaled and normalised.",
        tensorflow="Some of `keras.applications` (EfficientNet, ConvNeXt, MobileNetV3) begin with "
        "layers that scale and normalise; others have a function `preprocess_input`, of which "
        "there are three kinds.",
        why="A model that carries its preprocessing can't be fed wrongly, as long as nobody "
        "normalises before it.",
        in_pytorch="`x = (255 * x - mean) / std` with the mean and variance of the layers",
        in_tensorflow="give raw images, or build with `include_preprocessing=False` where there "
        "is such an argument",
    ),
}

LOSSES = {
    "loss_logits": Entry(
        pytorch="`cross_entropy` takes logits; there is no switch. Probabilities need "
        "`nll_loss(p.log(), y)`.",
        tensorflow="Losses take probabilities unless `from_logits=True`.",
        why="Keras began with models that end in a softmax. Either mistake trains, only worse: a "
        "softmax of probabilities is nearly uniform, and its gradients are small.",
        in_pytorch="`F.nll_loss(output.log(), y)`",
        in_tensorflow="`losses.SparseCategoricalCrossentropy(from_logits=True)`",
        defaults={
            "keras.losses.SparseCategoricalCrossentropy(from_logits)": False,
            "keras.losses.BinaryCrossentropy(from_logits)": False,
        },
    ),
    "loss_reduction": Entry(
        pytorch="`reduction='mean'` is over all elements; weights of classes count in what it is "
        "divided by.",
        tensorflow="`sum_over_batch_size` is the mean over all elements; weights of samples do not "
        "count in what it is divided by, unless `mean_with_sample_weight` is asked for.",
        why="A loss of sequences or boxes has more axes than the batch. Which of them are averaged "
        "and which are summed is a choice that is often made in the user's code.",
        in_pytorch="`F.cross_entropy(output, y, reduction='sum')`",
        in_tensorflow="`losses.SparseCategoricalCrossentropy(reduction='sum_over_batch_size')`",
        defaults={
            "torch.nn.CrossEntropyLoss(reduction)": "mean",
            "keras.losses.SparseCategoricalCrossentropy(reduction)": "sum_over_batch_size",
        },
    ),
    "label_smoothing": Entry(
        pytorch="`CrossEntropyLoss(label_smoothing=0.1)` takes classes or probabilities.",
        tensorflow="Only `CategoricalCrossentropy(label_smoothing=0.1)` has it, for one-hot "
        "targets; the sparse loss has none.",
        why="The formula is the same. A port to the sparse loss loses the argument.",
        in_pytorch="`F.cross_entropy(output, y, label_smoothing=0.0)`",
        in_tensorflow="`losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)` on "
        "`keras.ops.one_hot(y, classes)`",
        defaults={
            "torch.nn.CrossEntropyLoss(label_smoothing)": 0.0,
            "keras.losses.CategoricalCrossentropy(label_smoothing)": 0.0,
        },
    ),
    "ignored_labels": Entry(
        pytorch="`ignore_index` is -100, and the mean is over the others.",
        tensorflow="`ignore_class` is None, so that -100 is an index that does not exist. With it "
        "the mean is over the others, too.",
        why="TensorFlow on a CPU raises an error for such an index; on a GPU the loss is NaN. A "
        "padding label of 0 is a class to both unless it is named.",
        in_pytorch="`F.cross_entropy(output, y, ignore_index=0)`",
        in_tensorflow="`losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)`",
        defaults={
            "torch.nn.CrossEntropyLoss(ignore_index)": -100,
            "keras.losses.SparseCategoricalCrossentropy(ignore_class)": None,
        },
    ),
    "class_weights": Entry(
        pytorch="`weight` of `cross_entropy` divides by the sum of the weights that count.",
        tensorflow="`class_weight` and `sample_weight` divide by the number of samples.",
        why="With PyTorch's mean the weights change how samples count among each other, with "
        "Keras's also how large the loss is.",
        in_pytorch="`F.cross_entropy(output, y, weight, reduction='sum') / len(y)`",
        in_tensorflow="`losses...(reduction='mean_with_sample_weight')`",
    ),
    "loss_epsilon": Entry(
        pytorch="`binary_cross_entropy` keeps logarithms above -100.",
        tensorflow="Losses of probabilities keep these within 1e-7 and 1 - 1e-7.",
        why="Both avoid log(0). Where a model is sure and wrong the losses differ, and Keras's "
        "gradient is zero there. A loss of logits needs neither.",
        in_pytorch="`F.binary_cross_entropy(output.clamp(1e-7, 1 - 1e-7), y)`",
        in_tensorflow="`losses.BinaryCrossentropy(from_logits=True)`, and no sigmoid",
    ),
    "huber_delta": Entry(
        pytorch="`SmoothL1Loss(beta)` divides the quadratic part by beta; `HuberLoss(delta)` does "
        "not.",
        tensorflow="`Huber(delta)` is as PyTorch's `HuberLoss`.",
        why="The two are the same where the parameter is 1, and else differ by that factor.",
        in_pytorch="`nn.HuberLoss(delta=delta)`",
        in_tensorflow="`losses.Huber(beta)`, divided by beta",
        defaults={
            "torch.nn.SmoothL1Loss(beta)": 1.0,
            "torch.nn.HuberLoss(delta)": 1.0,
            "keras.losses.Huber(delta)": 1.0,
        },
    ),
    "regularisation": Entry(
        pytorch="`weight_decay` of an optimizer adds c w to the gradient, and nothing to the loss.",
        tensorflow="`kernel_regularizer=L2(c)` adds c w² to the loss, whose gradient is 2 c w.",
        why="The constants differ by a factor of two, the reported losses by the penalty.",
        in_pytorch="`loss + c * (weight ** 2).sum()`",
        in_tensorflow="`optimizers.SGD(...)` and `g + c * w` in place of the regularizer",
        defaults={"keras.layers.Dense(kernel_regularizer)": None},
    ),
}

OPTIMIZERS = {
    "learning_rate": Entry(
        pytorch="SGD 1e-3, Adam 1e-3, RMSprop 1e-2.",
        tensorflow="SGD 1e-2, Adam 1e-3, RMSprop 1e-3.",
        why="Defaults differ but for Adam. A schedule counts steps in Keras, and what its "
        "`step()` is called for in PyTorch: steps or epochs.",
        in_pytorch="`torch.optim.SGD(parameters, lr=1e-2)`",
        in_tensorflow="`optimizers.SGD(1e-3)`",
        defaults={
            "torch.optim.SGD(lr)": 1e-3,
            "torch.optim.Adam(lr)": 1e-3,
            "torch.optim.RMSprop(lr)": 1e-2,
            "keras.optimizers.SGD(learning_rate)": 1e-2,
            "keras.optimizers.Adam(learning_rate)": 1e-3,
            "keras.optimizers.RMSprop(learning_rate)": 1e-3,
        },
    ),
    "optimizer_epsilon": Entry(
        pytorch="1e-8, added to the root of the second moment after its correction for bias.",
        tensorflow="1e-7, added before the correction, which makes it larger in early steps: by "
        "1 / sqrt(1 - beta2 ** step). RMSprop adds it within the root.",
        why="Keras uses the form at the end of section 2 of the article on Adam, PyTorch that of "
        "its algorithm. It matters where gradients are of epsilon's size: in sparse "
        "embeddings, behind a loss that is a mean over very many elements.",
        in_pytorch="`torch.optim.Adam(parameters, eps=1e-7)`",
        in_tensorflow="`optimizers.Adam(epsilon=1e-8)`; the same first step with "
        "`epsilon=1e-8 * math.sqrt(1 - 0.999)`",
        defaults={
            "torch.optim.Adam(eps)": 1e-8,
            "torch.optim.RMSprop(eps)": 1e-8,
            "keras.optimizers.Adam(epsilon)": 1e-7,
            "keras.optimizers.RMSprop(epsilon)": 1e-7,
        },
    ),
    "decay_coupled": Entry(
        pytorch="`weight_decay` of Adam and SGD adds to the gradient; AdamW subtracts from the "
        "weight. AdamW's default is 1e-2.",
        tensorflow="`weight_decay` of every optimizer subtracts from the weight, as AdamW does. "
        "AdamW's default is 4e-3.",
        why="Keras 3 has one mechanism for all optimizers. In Adam, a decay that goes through the "
        "moments is divided by them, and decays large gradients less (Loshchilov and Hutter, "
        "2019).",
        in_pytorch="`torch.optim.AdamW(parameters, weight_decay=c)`",
        in_tensorflow="no decay, and `g + c * w` for each gradient before `optimizer.apply`",
        defaults={
            "torch.optim.Adam(weight_decay)": 0,
            "torch.optim.AdamW(weight_decay)": 1e-2,
            "keras.optimizers.Adam(weight_decay)": None,
            "keras.optimizers.AdamW(weight_decay)": 4e-3,
        },
    ),
    "weight_decay": Entry(
        pytorch="AdamW's decay is 1e-2 unless it is given.",
        tensorflow="AdamW's decay is 4e-3.",
        why="Both are the values of examples. Both multiply it by the learning rate, which the "
        "article does not.",
        in_pytorch="`torch.optim.AdamW(parameters, weight_decay=4e-3)`",
        in_tensorflow="`optimizers.AdamW(weight_decay=1e-2)`",
        defaults={
            "torch.optim.AdamW(weight_decay)": 1e-2,
            "keras.optimizers.AdamW(weight_decay)": 4e-3,
        },
    ),
    "decay_excluded": Entry(
        pytorch="Groups of parameters, each with its decay.",
        tensorflow="`optimizer.exclude_from_weight_decay(var_names=['bias'])`.",
        why="Without it both decay biases and normalisations, too, which most recipes leave out.",
        in_pytorch="`[{'params': kernels}, {'params': rest, 'weight_decay': 0}]` as the parameters",
        in_tensorflow="`optimizer.exclude_from_weight_decay(var_names=['bias', 'gamma', 'beta'])`",
    ),
    "optimizer_kind": Entry(
        pytorch="An object that the loop calls.",
        tensorflow="An object, or a name such as `'adam'` with its defaults.",
        why="`compile()` without an optimizer takes RMSprop.",
        in_pytorch="the optimizer that the other side has",
        in_tensorflow="the optimizer that the other side has",
    ),
    "optimizer_betas": Entry(
        pytorch="Adam keeps 0.9 and 0.999 of its moments, RMSprop 0.99.",
        tensorflow="Adam keeps 0.9 and 0.999 of its moments, RMSprop 0.9.",
        why="The words differ as well: `betas`, `alpha` in PyTorch; `beta_1`, `beta_2`, `rho` in "
        "Keras.",
        in_pytorch="`torch.optim.RMSprop(parameters, alpha=0.9)`",
        in_tensorflow="`optimizers.RMSprop(rho=0.99)`",
        defaults={
            "torch.optim.Adam(betas)": (0.9, 0.999),
            "torch.optim.RMSprop(alpha)": 0.99,
            "keras.optimizers.Adam(beta_1)": 0.9,
            "keras.optimizers.Adam(beta_2)": 0.999,
            "keras.optimizers.RMSprop(rho)": 0.9,
        },
    ),
    "optimizer_momentum": Entry(
        pytorch="The buffer sums gradients; the learning rate multiplies what is subtracted. "
        "`nesterov=True` looks ahead.",
        tensorflow="The learning rate is within the buffer. `nesterov=True` looks ahead.",
        why="With a constant rate both are the same. Where the rate changes, PyTorch's past "
        "gradients get the new rate, Keras's keep the old one. `dampening` is PyTorch's only. "
        "Another momentum shows from the second update on, Nesterov's in the first.",
        in_pytorch="`torch.optim.SGD(parameters, lr, momentum=0.9, nesterov=True)`",
        in_tensorflow="`optimizers.SGD(rate, momentum=0.9, nesterov=True)`",
        defaults={
            "torch.optim.SGD(momentum)": 0,
            "torch.optim.SGD(nesterov)": False,
            "keras.optimizers.SGD(momentum)": 0.0,
            "keras.optimizers.SGD(nesterov)": False,
        },
    ),
    "amsgrad": Entry(
        pytorch="`amsgrad=True` divides by the largest second moment so far.",
        tensorflow="`amsgrad=True` divides by the largest second moment so far.",
        why="It is off by default in both.",
        in_pytorch="`torch.optim.Adam(parameters, amsgrad=False)`",
        in_tensorflow="`optimizers.Adam(amsgrad=False)`",
        defaults={"torch.optim.Adam(amsgrad)": False, "keras.optimizers.Adam(amsgrad)": False},
    ),
    "accumulator": Entry(
        pytorch="Adagrad's sum of squares starts at 0.",
        tensorflow="Adagrad's sum of squares starts at 0.1.",
        why="From 0 the first update has the length of the learning rate, however small the "
        "gradient is; from 0.1 small gradients make small updates.",
        in_pytorch="`torch.optim.Adagrad(parameters, initial_accumulator_value=0.1)`",
        in_tensorflow="`optimizers.Adagrad(initial_accumulator_value=0.0)`",
        defaults={
            "torch.optim.Adagrad(initial_accumulator_value)": 0,
            "keras.optimizers.Adagrad(initial_accumulator_value)": 0.1,
        },
    ),
    "embedding_slices": Entry(
        pytorch="The gradient of an embedding is an array with the sum of a token's gradients, "
        "unless `sparse=True`.",
        tensorflow="The gradient is slices, one a look-up. Keras's Adam adds up the squares of the "
        "slices of a token that a batch holds twice, where PyTorch squares their sum. Clipping by "
        "a norm takes that of the slices.",
        why="Slices save the memory of an array as large as the embedding. Rules that are not "
        "linear in the gradient would have to add them up first.",
        in_pytorch="nothing does the same",
        in_tensorflow="`keras.ops.take(self.embeddings * 1.0, tokens, axis=0)` as the `call` of a "
        "subclass of `Embedding`, whose gradient is an array",
        defaults={"torch.nn.Embedding(sparse)": False},
    ),
    "bias_correction": Entry(
        pytorch="Adam always corrects.",
        tensorflow="Adam always corrects. The optimizer of the first BERT, LAMB of some "
        "collections and RMSprop do not.",
        why="Without it the first updates are larger, by (1 - beta1) / sqrt(1 - beta2): some three "
        "times.",
        in_pytorch="`torch.optim.Adam(...)`, or the same rule by hand",
        in_tensorflow="`optimizers.Adam(...)`, or the same rule by hand",
    ),
    "clipping": Entry(
        pytorch="`clip_grad_norm_` clips by the norm of all gradients together; "
        "`clip_grad_value_` clips each number.",
        tensorflow="`clipnorm` clips each variable by its norm, `global_clipnorm` all together, "
        "`clipvalue` each number.",
        why="`clipnorm` looks like PyTorch's, and keeps no direction: variables with large "
        "gradients are scaled, others not.",
        in_pytorch="`for p in parameters: clip_grad_norm_([p], 1.0)`",
        in_tensorflow="`optimizers.SGD(rate, global_clipnorm=1.0)`",
        defaults={
            "keras.optimizers.SGD(clipnorm)": None,
            "keras.optimizers.SGD(global_clipnorm)": None,
        },
    ),
    "stopped_gradient": Entry(
        pytorch="`x.detach()`, or a block within `torch.no_grad()`.",
        tensorflow="`tf.stop_gradient(x)`, or what NumPy computed.",
        why="It changes no output. A conversion to NumPy within a model stops gradients without a "
        "word in TensorFlow, and is refused in PyTorch.",
        in_pytorch="`x` without `.detach()`",
        in_tensorflow="`x` without `tf.stop_gradient`",
    ),
    "frozen": Entry(
        pytorch="`requires_grad_(False)`, or a parameter that the optimizer is not given.",
        tensorflow="`layer.trainable = False`.",
        why="Predictions and losses of the first step agree, so that only training shows it. A "
        "parameter that PyTorch's optimizer was not given has a gradient and never moves.",
        in_pytorch="`layer.requires_grad_(True)`, before the optimizer is made",
        in_tensorflow="`layer.trainable = True`, before the first step",
    ),
}

VALUES = {
    "initial_values": Entry(
        pytorch="Dense layers and convolutions: uniform within 1 / sqrt(inputs), biases, too. "
        "Embeddings: normal with deviation 1.",
        tensorflow="Dense layers and convolutions: Glorot's uniform, biases zero. Recurrent "
        "kernels: orthogonal. Embeddings: uniform within 0.05.",
        why="Each kept what its first version had. Of square layers PyTorch's deviation is smaller "
        "by a factor of 1.7; of embeddings larger by one of 35.",
        in_pytorch="`nn.init.xavier_uniform_(weight)`, `nn.init.zeros_(bias)`",
        in_tensorflow="`kernel_initializer=keras.initializers.VarianceScaling(1 / 3, 'fan_in', "
        "'uniform')`",
        defaults={
            "keras.layers.Dense(kernel_initializer)": "glorot_uniform",
            "keras.layers.Dense(bias_initializer)": "zeros",
            "keras.layers.LSTM(recurrent_initializer)": "orthogonal",
            "keras.layers.Embedding(embeddings_initializer)": "uniform",
        },
    ),
    "kernel_layout": Entry(
        pytorch="Dense: (outputs, inputs). Convolutions: (outputs, inputs, height, width). "
        "Transposed ones: (inputs, outputs, height, width).",
        tensorflow="Dense: (inputs, outputs). Convolutions: (height, width, inputs, outputs). "
        "Transposed ones: (height, width, outputs, inputs). Depthwise: (height, width, inputs, "
        "multiplier).",
        why="PyTorch multiplies by the transposed matrix, TensorFlow by the matrix. A square one "
        "fits either way.",
        in_pytorch="`weight.T`, `weight.permute(2, 3, 1, 0)`",
        in_tensorflow="`kernel.T`, `numpy.transpose(kernel, (3, 2, 0, 1))`",
    ),
    "swapped_weights": Entry(
        pytorch="`state_dict()` lists layers in the order in which `__init__` made them.",
        tensorflow="`model.weights` lists them in the order of the graph, or in which they were "
        "built.",
        why="Weights that are copied by their place in these lists go to another layer where the "
        "orders differ. Of equal shapes nothing fails.",
        in_pytorch="copy by name: `state['encoder.0.weight']`",
        in_tensorflow="copy by name: `model.get_layer('encoder_0').set_weights(...)`",
    ),
    "missing_bias": Entry(
        pytorch="torchvision's convolutions before BatchNorm have none.",
        tensorflow="`keras.applications.ResNet50` has one before each BatchNorm.",
        why="BatchNorm subtracts the mean, and with it the bias. The parameter is of no use; it "
        "costs memory, and it moves the running mean.",
        in_pytorch="`nn.Conv2d(..., bias=True)`",
        in_tensorflow="`layers.Conv2D(..., use_bias=False)`",
        defaults={
            "torch.nn.Conv2d(bias)": True,
            "keras.layers.Conv2D(use_bias)": True,
        },
    ),
    "float64": Entry(
        pytorch="Tensors keep the type of NumPy's arrays, which is float64; a layer in float32 "
        "refuses them.",
        tensorflow="Keras converts inputs to the type of the layer, float32 unless "
        "`keras.config.set_floatx` or a policy says otherwise.",
        why="PyTorch fails loudly, Keras converts in silence. Results differ by rounding, and it "
        "takes more time or less.",
        in_pytorch="`model.float()`, `x.float()`",
        in_tensorflow="`keras.config.set_dtype_policy('float32')`",
    ),
    "tf32": Entry(
        pytorch="Convolutions may use it, matrix products may not, unless asked.",
        tensorflow="Both use it.",
        why="TF32 keeps 10 bits of the mantissa, so that results agree to three digits only. On a "
        "CPU there is none.",
        in_pytorch="`torch.set_float32_matmul_precision('high')`",
        in_tensorflow="`tf.config.experimental.enable_tensor_float_32_execution(False)`",
    ),
    "denormals": Entry(
        pytorch="Numbers below 1.2e-38 are computed with, slowly, unless "
        "`torch.set_flush_denormal(True)`.",
        tensorflow="Its threads set them to zero.",
        why="They take a processor a hundred times as long. TensorFlow chose speed, PyTorch the "
        "standard.",
        in_pytorch="`torch.set_flush_denormal(True)`",
        in_tensorflow="scale the numbers: there is no switch",
    ),
}

GROUPS = {
    "Convolutions and pooling": CONVOLUTIONS,
    "Shapes and axes": SHAPES,
    "Normalisation": NORMALIZATION,
    "Activations": ACTIVATIONS,
    "Recurrent layers and sequences": RECURRENT,
    "Dropout": DROPOUT,
    "Attention and residuals": ATTENTION,
    "Images": IMAGES,
    "Losses": LOSSES,
    "Optimizers": OPTIMIZERS,
    "Weights and numbers": VALUES,
}
