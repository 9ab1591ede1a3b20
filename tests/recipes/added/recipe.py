import torch

from ssl_sec.data.image_set import on_device
from ssl_sec.data.samplers import ShuffledBatches
from ssl_sec.networks import save_weights
from ssl_sec.recipes.assembly import assembled, initialised, taken_up
from ssl_sec.training.objective import Objective
from ssl_sec.training.step import Cadence, Recipe, train


def run(config, runtime, store):
    images = on_device(config.data.open("train"), runtime.device)
    encoder, head = initialised(config, images, runtime)
    sampler = ShuffledBatches(num_images=len(images), global_batch_size=config.global_batch_size, seed=config.seed)
    steps = config.epochs * sampler.steps_per_epoch
    loss = config.loss.build(len(images.class_names), config.head.dim)
    torch.nn.init.normal_(loss.weight, std=0.01, generator=torch.Generator().manual_seed(config.seed))
    eta = config.constraint.weight(sampler.steps_per_epoch, steps)
    objective = Objective(loss, config.constraint.build(), eta)
    computation = config.runtime.on(runtime.device)
    recipe = Recipe(
        encoder=encoder,
        head=head,
        model=assembled(encoder, head, objective, runtime, computation),
        objective=objective,
        optimiser=config.optimiser.build(encoder, head, objective),
        learning_rate=config.optimiser.schedule(sampler.steps_per_epoch, steps),
        image_set=images,
        sampler=sampler,
        views=config.augment.build(config.seed),
        row_labels=lambda batch, rows: batch.labels,
        total_steps=steps,
        computation=computation,
    )
    every_epoch = sampler.steps_per_epoch
    cadence = Cadence(log_every_steps=1, save_every_steps=every_epoch, monitor_every_steps=every_epoch)
    train(recipe, runtime, cadence, lambda steps_taken: {}, taken_up(recipe, runtime, store))
    save_weights(encoder.backbone, store.encoder_path)
    save_weights(head, store.head_path)
