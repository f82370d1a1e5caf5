"""`titan flux-encode`: against transformers and diffusers called by hand, on tiny random encoders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from titan_flux.encode import open_image, pairs_of
from titan_flux.shards import Shards
from titancli.cli import main
from titancli.errors import EnvironmentProblem

pytest.importorskip("diffusers", reason="the extra [encode] installs it")
Image = pytest.importorskip("PIL.Image", reason="the extra [encode] installs it")

LETTERS = [chr(code) for code in range(97, 123)]


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a FLUX.1 folder without its transformer, of a few thousand parameters."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline
    from transformers import (
        CLIPTextConfig,
        CLIPTextModel,
        CLIPTokenizer,
        T5Config,
        T5EncoderModel,
        T5TokenizerFast,
    )

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("flux")
    tokens = ["<|startoftext|>", "<|endoftext|>", *LETTERS, *[f"{letter}</w>" for letter in LETTERS]]
    (folder / "vocab.json").write_text(json.dumps({token: n for n, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    clip = CLIPTextConfig(
        vocab_size=len(tokens),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        **ids,
    )
    t5 = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -1.0), *[(c, -2.0) for c in LETTERS]]
    vae = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[4] * 4,
        norm_num_groups=2,
        latent_channels=4,
        shift_factor=0.1159,
        scaling_factor=0.3611,
    )
    vocabulary = {"vocab": str(folder / "vocab.json"), "merges": str(folder / "merges.txt")}
    FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=CLIPTextModel(clip),
        tokenizer=CLIPTokenizer(**vocabulary, model_max_length=77),
        text_encoder_2=T5EncoderModel(t5),
        tokenizer_2=T5TokenizerFast(vocab=pieces, extra_ids=0),
        transformer=None,
    ).save_pretrained(folder / "model")
    return folder / "model"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    (folder / "more").mkdir(parents=True)
    for n, name in enumerate(("a.png", "b.JPG", "more/c.png")):
        picture = Image.effect_noise((40 + 8 * n, 32), 40 + n).convert("RGB")
        picture.save(folder / name)
    (folder / "a.txt").write_text(" a cat\n")
    rows = [{"file_name": "b.JPG", "text": "a dog"}, {"file_name": "more/c.png", "text": "a cow"}]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return folder


def test_a_text_may_have_any_character(images: Path) -> None:
    """At U+2028 `str.splitlines` breaks a line, JSON Lines do not."""
    rows = [{"file_name": name, "text": f"{name}\u2028!"} for name in ("b.JPG", "more/c.png")]
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (images / "metadata.jsonl").write_text(text, encoding="utf-8")
    assert [pair.text for pair in pairs_of(images)] == ["a cat", "b.JPG\u2028!", "more/c.png\u2028!"]


def encode(images: Path, out: Path, flux: Path, *more: str) -> int:
    small = ("--size", "32", "--text-length", "16", "--dtype", "float32")
    return main(["flux-encode", str(images), str(out), "--model", str(flux), *small, *more])


def test_shards_hold_what_the_encoders_make_of_images_and_texts(
    flux: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from diffusers import AutoencoderKL
    from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5TokenizerFast

    out, empty = tmp_path / "out", tmp_path / "empty.safetensors"
    assert encode(images, out, flux, "--per-shard", "2", "--empty", str(empty)) == 0
    shards = [out / "00000.safetensors", out / "00001.safetensors"]
    assert capsys.readouterr().out.splitlines() == [*map(str, shards), str(empty)]
    assert sorted(out.iterdir()) == shards

    dataset = Shards([out], empty, shuffle=False, seed=0)  # as the dataset reads them
    assert dataset.count == 3
    assert [tuple(part) for part in dataset.shape] == [(4, 4, 4), (16, 32), (16,)]

    vae = AutoencoderKL.from_pretrained(flux / "vae")
    clip = CLIPTextModel.from_pretrained(flux / "text_encoder")
    t5 = T5EncoderModel.from_pretrained(flux / "text_encoder_2")
    words = CLIPTokenizer.from_pretrained(flux / "tokenizer")
    pieces = T5TokenizerFast.from_pretrained(flux / "tokenizer_2")
    for number, (name, text) in enumerate((("a.png", "a cat"), ("b.JPG", "a dog"), ("more/c.png", "a cow"))):
        found = dataset.read(number)
        with torch.no_grad():
            short = words(text, padding="max_length", max_length=77, return_tensors="pt").input_ids
            long = pieces(text, padding="max_length", max_length=16, return_tensors="pt").input_ids
            pooled, states = clip(short).pooler_output[0], t5(long)[0][0]
            mean = vae.encode(open_image(images / name, 32)[None]).latent_dist
            drawn = mean.sample(torch.Generator().manual_seed(number))[0]
        torch.testing.assert_close(found.pooled, pooled)
        torch.testing.assert_close(found.text, states)
        torch.testing.assert_close(found.latents, (drawn - 0.1159) * 0.3611)
    assert load_file(empty)["text"].shape == (1, 16, 32)


def test_an_image_is_its_middle_square_from_minus_one_to_one(tmp_path: Path) -> None:
    picture = Image.new("RGB", (96, 32), (0, 0, 0))
    picture.paste((255, 255, 255), (32, 0, 64, 32))
    picture.save(tmp_path / "wide.png")
    assert torch.equal(open_image(tmp_path / "wide.png", 32), torch.ones(3, 32, 32))
    Image.new("L", (16, 16), 0).save(tmp_path / "grey.png")
    assert torch.equal(open_image(tmp_path / "grey.png", 16), -torch.ones(3, 16, 16))


def test_what_is_wrong_with_a_folder_is_named(images: Path) -> None:
    (images / "a.txt").unlink()
    with pytest.raises(EnvironmentProblem, match=r"a\.png has no text"):
        pairs_of(images)
    (images / "metadata.jsonl").write_text('{"file_name": "a.png"}\n')
    with pytest.raises(EnvironmentProblem, match=r"metadata\.jsonl:1 has no file_name and text"):
        pairs_of(images)
    with pytest.raises(EnvironmentProblem, match="has no images"):
        pairs_of(images / "none")
    (images / "bad.png").write_bytes(b"no image")
    with pytest.raises(EnvironmentProblem, match=r"bad\.png cannot be read"):
        open_image(images / "bad.png", 16)


def test_what_is_wrong_with_the_command_line_writes_nothing(
    flux: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert encode(images, out, flux, "--size", "40") == 2
    assert encode(images, out, tmp_path) == 5
    assert "is not a folder of FLUX.1: it has no vae" in capsys.readouterr().err
    assert encode(images, out, flux, "--empty", str(out / "empty.safetensors")) == 2
    assert not out.exists()
    out.mkdir()
    (out / "mine").write_text("x")
    assert encode(images, out, flux) == 5
    assert [path.name for path in out.iterdir()] == ["mine"]
