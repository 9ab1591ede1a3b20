import torch

from ssl_sec.data.image_set import on_device
from ssl_sec.data.samplers import ShuffledBatches
from ssl_sec.recipes.assembly import assemble, save_network, train_recipe


def run(config, runtime, store):
    images = on_device(config.data.open("train"), runtime.device)
    sampler = ShuffledBatches(num_images=len(images), global_batch_size=config.global_batch_size, seed=config.seed)
    loss = config.loss.build(len(images.class_names), config.head.dim)
    torch.nn.init.normal_(loss.weight, std=0.01, generator=torch.Generator().manual_seed(config.seed))
    total_steps, views = config.epochs * sampler.steps_per_epoch, config.augment.build(config.seed)
    recipe = assemble(config, images, runtime, sampler=sampler, total_steps=total_steps, loss=loss, views=views)
    train_recipe(config, recipe, runtime, store, lambda steps_taken: {}, sampler.steps_per_epoch)
    save_network(recipe, store, with_head=True)
