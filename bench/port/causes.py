"""The catalogue: where the two frameworks are known to differ, why, and what to change.

Each is checked by making the change on PyTorch's side of the comparison, and seeing the difference
go. `{a}` is PyTorch's value and `{b}` TensorFlow's, where a check knows them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """key: its name. title: what differs, in a few words. why: why the frameworks differ there.

    change_pt, change_tf: the line to change on either side; one of both is enough.
    """

    key: str
    title: str
    why: str
    change_pt: str
    change_tf: str


CATALOGUE: dict[str, Cause] = {
    cause.key: cause
    for cause in (
        # Layers, in evaluation mode
        Cause(
            "padding",
            "padding of a strided convolution or pooling",
            "padding='same' of TensorFlow pads to a whole number of strides, and puts the odd row "
            "and column at the end. PyTorch pads the same at both ends.",
            "x = F.pad(x, {pads}) before the layer, and padding=0 in it",
            "ZeroPadding({padding}) before the layer, and padding='valid' in it",
        ),
        Cause(
            "pool_padding_counted",
            "whether an average counts padded zeros",
            "PyTorch's AvgPool counts padded zeros (count_include_pad=True), TensorFlow's does "
            "not.",
            "count_include_pad={b}",
            "ZeroPadding before the layer and padding='valid' in it, or 'same' without it",
        ),
        Cause(
            "ceil_mode",
            "rows that a pooling window covers in part",
            "PyTorch leaves out what a window covers in part unless ceil_mode=True; "
            "padding='same' of TensorFlow takes it.",
            "ceil_mode={b}",
            "padding='valid' to leave it out, 'same' to take it",
        ),
        Cause(
            "norm_epsilon",
            "epsilon of a normalisation",
            "Defaults differ: BatchNorm and LayerNorm have 1e-5 in PyTorch and 1e-3 in Keras.",
            "eps={b}",
            "epsilon={a}",
        ),
        Cause(
            "gelu",
            "exact GELU or its tanh approximation",
            "nn.GELU and Keras's gelu are exact by default; many published models, and tf.nn.gelu "
            "of older code, use the tanh form.",
            "nn.GELU(approximate='{b}')",
            "keras.activations.gelu(x, approximate={a})",
        ),
        Cause(
            "negative_slope",
            "slope of LeakyReLU, or alpha of ELU",
            "Defaults differ: LeakyReLU has 0.01 in PyTorch and 0.3 in Keras.",
            "negative_slope={b}",
            "negative_slope={a}",
        ),
        Cause(
            "softmax_axis",
            "the axis of softmax",
            "nn.Softmax takes its axis, and guesses it by the rank where none is given; Keras "
            "takes the last. With channels first the last axis is the width.",
            "dim={b}",
            "axis={a} (in TensorFlow's layout)",
        ),
        Cause(
            "flatten_order",
            "the order in which an image is flattened",
            "PyTorch flattens channels, rows, columns; TensorFlow rows, columns, channels. A dense "
            "layer after it has its weights in that order.",
            "x = x.permute(0, 2, 3, 1) before flatten",
            "Permute((3, 1, 2)) before Flatten",
        ),
        Cause(
            "interpolation",
            "interpolation: its kind, or where corners lie",
            "PyTorch's F.interpolate has align_corners, and its 'nearest' takes the left pixel; "
            "Keras's resizing has half-pixel centres.",
            "F.interpolate(x, {b})",
            "resize as PyTorch does: {a}",
        ),
        Cause(
            "batch_first",
            "which axis is time",
            "nn.LSTM, nn.GRU and nn.MultiheadAttention take (time, batch, features) unless "
            "batch_first=True; Keras always takes (batch, time, features).",
            "batch_first={b}",
            "transpose the first two axes before and after the layer",
        ),
        Cause(
            "recurrent_last",
            "the last output of a layer that runs both ways",
            "out[:, -1] of a bidirectional layer of PyTorch has the backward direction's first "
            "step; Keras returns its last, which is that of the first token.",
            "torch.cat([out[:, -1, :H], out[:, 0, H:]], -1)",
            "return_sequences=True, then x[:, -1]",
        ),
        Cause(
            "gru_reset",
            "where a GRU resets",
            "PyTorch multiplies by the reset gate after the recurrent product; Keras does so with "
            "reset_after=True (the default), and before it with False.",
            "write the cell by hand: nn.GRU has no such form",
            "reset_after=True",
        ),
        Cause(
            "recurrent_activation",
            "the activation of a recurrent layer or its gates",
            "nn.LSTM and nn.GRU have sigmoid and tanh and nothing else; Keras takes any.",
            "write the cell by hand: nn.LSTM and nn.GRU have sigmoid and tanh",
            "activation='tanh', recurrent_activation='sigmoid'",
        ),
        Cause(
            "mask",
            "padding tokens: masked on one side",
            "Embedding(mask_zero=True) hands a mask to the layers after it in Keras, without a "
            "word; in PyTorch lengths and masks are arguments.",
            "give the mask: {b}",
            "{a}",
        ),
        Cause(
            "causal",
            "whether a token sees those after it",
            "In both frameworks a causal mask is an argument of the call, by default absent.",
            "is_causal={b}",
            "use_causal_mask={a}",
        ),
        Cause(
            "denormals",
            "numbers below 1.2e-38",
            "TensorFlow's threads flush denormals to zero, PyTorch keeps them.",
            "torch.set_flush_denormal(True)",
            "scale the numbers: TensorFlow cannot keep them",
        ),
        Cause(
            "float64",
            "float64 on one side",
            "NumPy makes float64 and PyTorch computes in what it is given; Keras casts its inputs "
            "to float32 without a word.",
            "model.float(), and arrays of float32",
            "keras.config.set_floatx('float64') before the model is made",
        ),
        # Layers that are written otherwise
        Cause(
            "transposed_padding",
            "what a transposed convolution crops",
            "padding='same' of TensorFlow crops the odd row and column at the end, PyTorch's "
            "padding and output_padding at the beginning.",
            "padding=0, and x[..., :-1, :-1] after the layer",
            "padding='valid', and Cropping2D(((1, 0), (1, 0))) after the layer",
        ),
        Cause(
            "stride_place",
            "which convolution of a block has the stride",
            "torchvision's ResNet-50 has it in the 3x3 convolution (version 1.5), that of "
            "keras.applications in the first 1x1 (version 1).",
            "stride={b}",
            "strides={a}",
        ),
        Cause(
            "reshape_order",
            "the order in which a reshape reads",
            "A reshape reads in the order of memory, and axes lie otherwise: channels first or "
            "last, heads before or after their size.",
            "turn the axes before the reshape: x.permute(0, 2, 3, 1)",
            "turn the axes before the reshape: Permute((3, 1, 2))",
        ),
        Cause(
            "activation",
            "another activation",
            "It has no weights, so that copying them does not show that it is another.",
            "{b}",
            "activation={a}",
        ),
        Cause(
            "forget_bias",
            "one more in the forget gate's bias",
            "Keras starts that bias at 1 (unit_forget_bias), and cells of TensorFlow 1 added it at "
            "each step, so that no weight had it.",
            "add 1 to bias_ih[hidden:2 * hidden]",
            "copy the bias as it is, without 1 in the forget gate",
        ),
        Cause(
            "padding_token",
            "whether the embedding of the padding token learns",
            "padding_idx of PyTorch gives its row no gradient; mask_zero of Keras only makes a "
            "mask.",
            "nn.Embedding without padding_idx",
            "multiply the embedding by tokens != 0",
        ),
        Cause(
            "attention_scale",
            "the scale of attention",
            "scaled_dot_product_attention and MultiHeadAttention divide by the root of a head's "
            "size; layers.Attention of Keras does not.",
            "scale={b}",
            "divide the queries by the root of a head's size",
        ),
        Cause(
            "attention_mask",
            "what True means in a mask of attention",
            "True is left out by nn.MultiheadAttention, and takes part in "
            "scaled_dot_product_attention and in Keras.",
            "key_padding_mask=~mask",
            "attention_mask=~mask",
        ),
        Cause(
            "missing_residual",
            "a residual that one side lacks",
            "A sum has no weights, so that copying them does not show that it is missing.",
            "{b}",
            "{a}",
        ),
        Cause(
            "preprocessing",
            "scaling and normalising within the model",
            "Some models of keras.applications begin with it, those of torchvision expect it of "
            "their input.",
            "x = (255 * x - mean) / std before the model",
            "give the model raw images",
        ),
        Cause(
            "missing_bias",
            "a bias that one side has",
            "torchvision's convolutions before BatchNorm have none; some of keras.applications "
            "have one, which BatchNorm takes off again.",
            "bias={b}",
            "use_bias={a}",
        ),
        Cause(
            "embedding_slices",
            "a token that a batch holds more than once",
            "An embedding's gradient is an array in PyTorch and slices in TensorFlow, one a "
            "look-up. Keras's Adam adds up the squares of a repeated token's slices, and clipping "
            "takes their norm; PyTorch squares their sum.",
            "nothing: its gradient is the sum",
            "an Embedding whose call is ops.take(self.embeddings * 1.0, tokens, axis=0)",
        ),
        Cause(
            "bias_correction",
            "correction of the moments for bias",
            "Adam of both corrects; the optimizer of the first BERT does not, so that its first "
            "updates are larger.",
            "{b}",
            "{a}",
        ),
        # Weights
        Cause(
            "initial_values",
            "weights that were not copied",
            "Layers are initialised by other rules and other random numbers in each framework.",
            "copy them in copy_weights",
            "copy them in copy_weights: set_weights of this layer",
        ),
        Cause(
            "kernel_layout",
            "axes of a kernel",
            "Dense kernels are (out, in) in PyTorch and (in, out) in Keras, convolutions (out, in, "
            "height, width) and (height, width, in, out). Where numbers are equal no shape tells.",
            "copy the kernel with its axes turned",
            "copy the kernel with its axes turned: {b}",
        ),
        Cause(
            "swapped_weights",
            "weights copied to the wrong place",
            "set_weights takes weights in the order of Keras's layer: gamma, beta, moving_mean, "
            "moving_variance; kernel, recurrent_kernel, bias.",
            "copy it to its place",
            "copy it to its place: {b}",
        ),
        Cause(
            "recurrent_gates",
            "the order of gates",
            "nn.LSTM has the gates input, forget, cell, output, as Keras has; nn.GRU has reset, "
            "update, new, and Keras update, reset, new.",
            "copy the gates in Keras's order",
            "copy the gates in Keras's order: {b}",
        ),
        Cause(
            "recurrent_bias",
            "the two biases of a recurrent layer",
            "nn.LSTM and nn.GRU have a bias of the input and one of the state; Keras's LSTM has "
            "their sum, so that the same step of an optimizer moves it half as far.",
            "freeze bias_hh at zero: it is one bias too many",
            "set_weights with bias_ih + bias_hh; training goes on with one bias",
        ),
        # Training mode
        Cause(
            "norm_momentum",
            "momentum of running statistics",
            "PyTorch's momentum is the share of the new value (0.1), Keras's that of the old "
            "(0.99): they are one minus each other.",
            "momentum={b}",
            "momentum={a}",
        ),
        Cause(
            "running_variance",
            "biased or unbiased running variance",
            "PyTorch keeps the unbiased variance (n - 1) in evaluation, Keras the biased one (n), "
            "so that they differ by n / (n - 1).",
            "a BatchNorm that keeps the biased variance",
            "nothing: it fades with larger batches and images",
        ),
        Cause(
            "norm_frozen",
            "a normalisation that uses its running statistics in training",
            "Keras's BatchNormalization with trainable=False also runs in evaluation mode; "
            "PyTorch's does so after eval(), whatever requires_grad says.",
            "module.eval() for this layer in training",
            "trainable={a}",
        ),
        Cause(
            "dropout_rate",
            "the rate of dropout",
            "Both take the share that is dropped. Code of TensorFlow 1 gives the share that is "
            "kept.",
            "p={b}",
            "rate={a}",
        ),
        Cause(
            "dropout_shape",
            "whole channels dropped, or single values",
            "Dropout2d of PyTorch and SpatialDropout2D of Keras drop channels; Dropout drops "
            "single values.",
            "nn.{b}",
            "{a}",
        ),
        Cause(
            "dropout_missing",
            "dropout on one side only",
            "Many layers have their own dropout argument, which is easily missed.",
            "{b}",
            "{a}",
        ),
        Cause(
            "recurrent_dropout",
            "dropout of recurrent layers",
            "dropout= of nn.LSTM drops the outputs of all layers but the last, another value at "
            "every step of time; dropout= of Keras's LSTM drops its inputs, the same at all steps.",
            "nn.LSTM without dropout, and one mask for all steps on each layer's inputs",
            "LSTM(dropout=0.0), and Dropout({a}) between the layers",
        ),
        # Loss
        Cause(
            "loss_logits",
            "a loss of logits or of probabilities",
            "F.cross_entropy takes logits; Keras's cross entropies take probabilities unless "
            "from_logits=True. Both accept the other without a word.",
            "{b}",
            "from_logits={a}",
        ),
        Cause(
            "loss_reduction",
            "a mean or a sum",
            "reduction='mean' and 'sum' of PyTorch are 'sum_over_batch_size' and 'sum' in Keras; "
            "gradients are larger by the same factor.",
            "reduction='{b}'",
            "reduction='{a}'",
        ),
        Cause(
            "label_smoothing",
            "label smoothing",
            "Both spread it over all classes; Keras's sparse losses have no such argument.",
            "label_smoothing={b}",
            "label_smoothing={a}",
        ),
        Cause(
            "ignored_labels",
            "labels that are ignored",
            "F.cross_entropy leaves out the label -100 (ignore_index), in the mean's count, too; "
            "Keras's losses leave out ignore_class in the same way, which is None by default.",
            "ignore_index={b}",
            "ignore_class={a}",
        ),
        Cause(
            "class_weights",
            "how weights of classes are averaged",
            "F.cross_entropy with weight= divides by the sum of weights, Keras by the batch.",
            "reduction='sum', then divide by the batch",
            "divide by the sum of the weights",
        ),
        Cause(
            "loss_epsilon",
            "how a loss is kept from log(0)",
            "Keras clips probabilities to [1e-7, 1 - 1e-7], PyTorch clamps logarithms at -100.",
            "give logits to a loss of logits",
            "from_logits=True, and no softmax or sigmoid in the model",
        ),
        Cause(
            "regularisation",
            "a penalty on weights in the loss",
            "kernel_regularizer of Keras adds to the loss; PyTorch has weight_decay in the "
            "optimizer. l2(c) is a weight_decay of 2 c for SGD.",
            "add the penalty to the loss",
            "no kernel_regularizer",
        ),
        Cause(
            "huber_delta",
            "where a Huber loss becomes linear",
            "smooth_l1_loss of PyTorch divides by beta, Keras's Huber does not: they are equal at "
            "1 alone.",
            "F.huber_loss(delta={b})",
            "Huber(delta={a})",
        ),
        # Gradients
        Cause(
            "frozen",
            "a weight that is trained on one side only",
            "requires_grad=False is of a parameter, trainable=False of a layer and all in it.",
            "requires_grad_({b})",
            "trainable={a}",
        ),
        Cause(
            "stopped_gradient",
            "a gradient that is stopped on one side",
            "detach() in PyTorch and tf.stop_gradient in TensorFlow change no output.",
            "{b}",
            "{a}",
        ),
        # Optimizer
        Cause(
            "optimizer_kind",
            "the optimizers are not of the same kind",
            "Adam and AdamW, or SGD and Adam, are other optimizers.",
            "torch.optim.{b}",
            "keras.optimizers.{a}",
        ),
        Cause(
            "learning_rate",
            "the learning rate",
            "Defaults differ (SGD has 0.01 in Keras, RMSprop 0.01 in PyTorch and 0.001 in Keras); "
            "a schedule is inside the optimizer in Keras and outside in PyTorch.",
            "lr={b}",
            "learning_rate={a}",
        ),
        Cause(
            "optimizer_epsilon",
            "epsilon of the optimizer",
            "Defaults differ: 1e-8 in PyTorch and 1e-7 in Keras. Keras adds it before the bias "
            "correction, so that it weighs more in the first steps.",
            "eps={b}",
            "epsilon={a}",
        ),
        Cause(
            "optimizer_betas",
            "how long an optimizer remembers",
            "Defaults differ for RMSprop: alpha 0.99 in PyTorch and rho 0.9 in Keras.",
            "{b}",
            "{a}",
        ),
        Cause(
            "optimizer_momentum",
            "momentum of SGD or RMSprop",
            "Keras folds the learning rate into the velocity and PyTorch does not; with a constant "
            "rate they are equal. dampening is PyTorch's alone.",
            "{b}",
            "{a}",
        ),
        Cause(
            "amsgrad",
            "AMSGrad",
            "An argument of both, off by default.",
            "amsgrad={b}",
            "amsgrad={a}",
        ),
        Cause(
            "weight_decay",
            "weight decay",
            "AdamW has 0.01 in PyTorch and 0.004 in Keras.",
            "weight_decay={b}",
            "weight_decay={a}",
        ),
        Cause(
            "decay_coupled",
            "weight decay in the gradient or beside it",
            "weight_decay of PyTorch's SGD and Adam is added to the gradient; that of all "
            "optimizers of Keras is taken from the weight, as AdamW does.",
            "torch.optim.AdamW, or decay by hand before the step",
            "kernel_regularizer=l2({a})",
        ),
        Cause(
            "decay_excluded",
            "which weights decay",
            "PyTorch chooses by parameter groups, Keras by exclude_from_weight_decay.",
            "groups: {b}",
            "optimizer.exclude_from_weight_decay(...): {a}",
        ),
        Cause(
            "clipping",
            "clipping of gradients",
            "Keras clips in the optimizer: clipnorm each variable by itself, global_clipnorm all "
            "together, clipvalue each number. PyTorch's clip_grad_norm_ clips all together, in the "
            "training loop.",
            "{b}",
            "{a}",
        ),
        Cause(
            "accumulator",
            "the first value of Adagrad's accumulator",
            "Defaults differ: 0 in PyTorch and 0.1 in Keras.",
            "initial_accumulator_value={b}",
            "initial_accumulator_value={a}",
        ),
        # The machine
        Cause(
            "tf32",
            "products in TF32",
            "On GPUs since Ampere TensorFlow multiplies in TF32 by default and PyTorch in float32. "
            "The comparison runs on the CPU, where there is none.",
            "torch.backends.cuda.matmul.allow_tf32 = True",
            "tf.config.experimental.enable_tensor_float_32_execution(False)",
        ),
        Cause(
            "data_format",
            "images in another order than the model means",
            "PyTorch takes channels first, Keras channels last. An array that is reshaped, not "
            "transposed, has the right shape and the wrong pixels.",
            "x.transpose(0, 3, 1, 2) of the other's batch",
            "x.transpose(0, 2, 3, 1) of the other's batch",
        ),
    )
}
