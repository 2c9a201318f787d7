"""Tiny configs of real causal language model classes: one or more of every model type that can be built this small.

A dense network has 48 slots, an expert 16; shared experts have 24 where their width is a field of its own, or twice an
expert's. The exceptions are told where they are. Models with experts have 40 hidden units and the others 32, so that
neither a width nor its double, of gate and up in one matrix, equals the hidden size.
"""

import copy
from typing import Any

from transformers import AutoConfig

Values = dict[str, Any]


def merged(*parts: Values, **more: Any) -> Values:
    """One dict of several: what comes later wins."""
    return {key: value for part in (*parts, more) for key, value in part.items()}


def alike(values: Values, *kinds: str) -> dict[str, Values]:
    """The same values for several model types."""
    return dict.fromkeys(kinds, values)


TOKENS: Values = {"vocab_size": 260, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
# Where positions are counted from the pad token on, or its position has a row of its own.
LOW_TOKENS: Values = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
SMALL: Values = {
    **TOKENS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
GROUPED = merged(SMALL, num_key_value_heads=2)
COMMON = merged(GROUPED, head_dim=8)
GPT = merged(TOKENS, n_embd=32, n_head=4, n_layer=2, n_positions=128)
BERT = merged(SMALL, is_decoder=True)
ROBERTA = merged(BERT, LOW_TOKENS, max_position_embeddings=130)
BART: Values = {
    **TOKENS,
    "d_model": 32,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")},
    "max_position_embeddings": 128,
    "forced_eos_token_id": None,
    "is_decoder": True,
}

MIXED = merged(COMMON, hidden_size=40)
# Three ways to say that there are four experts, of which two are chosen. In the second, experts take the field that
# elsewhere is the dense width.
EXPERTS: Values = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL: Values = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16}
ROUTED: Values = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 2}
GROUPS: Values = {"n_group": 1, "topk_group": 1}
SHARED: Values = {"shared_expert_intermediate_size": 24}
DENSE_SPARSE: Values = {"mlp_layer_types": ["dense", "sparse"]}

SLIDING_FULL: Values = {"layer_types": ["sliding_attention", "full_attention"]}
LINEAR_FULL: Values = {"layer_types": ["linear_attention", "full_attention"]}
CONV_FULL: Values = {"layer_types": ["conv", "full_attention"]}
LINEAR_HYBRID: Values = {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}
RANKS: Values = {"q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
LATENT = merged(SMALL, RANKS, num_key_value_heads=4)
LATENT_MIXED = merged(LATENT, ROUTED, hidden_size=40)
INDEX: Values = {"index_topk": 8, "index_head_dim": 8, "index_n_heads": 2}
DELTA: Values = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4},
}
KIMI: Values = {
    **EXPERTS,
    **{"q_lora_rank": None, "num_expert_group": 1, "topk_group": 1, "num_shared_experts": 2},
    **{"linear_head_dim": 8, "linear_num_heads": 4},
}
MAMBA: Values = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
MAMBA2 = merged(MAMBA, mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_chunk_size=8)
NEMOTRON_H: Values = {
    **{"mamba_num_heads": 10, "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 8, "chunk_size": 8},
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    **{"n_shared_experts": 1, "moe_shared_expert_intermediate_size": 24},
}
INKLING: Values = {
    **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8},
    **{"d_rel": 4, "rel_extent": 16, "unpadded_vocab_size": 260},
}
INDEXER: Values = {
    **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8},
    **{"indexer_budget": 8, "indexer_compress_ratio": 4},
}
PER_LAYER: Values = {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 260, "num_kv_shared_layers": 0}
GEMMA4 = merged(COMMON, PER_LAYER, SLIDING_FULL, global_head_dim=8)
GEMMA4_DENSE = merged(COMMON, SLIDING_FULL, global_head_dim=8)
GEMMA4_MIXED = merged(GEMMA4, EXPERTS, hidden_size=40, enable_moe_block=True, top_k_experts=2)
QWEN_NEXT = merged(MIXED, EXPERTS, SHARED, DELTA, LINEAR_FULL)

# What is not text has 24 hidden units and 40 slots.
TOWER: Values = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION = merged(TOWER, image_size=16, patch_size=8)
PHI4_AUDIO: Values = {
    **{"hidden_size": 24, "intermediate_size": 40, "num_blocks": 1, "num_attention_heads": 2, "input_size": 16},
    **{"ext_pw_out_channel": 24, "depthwise_separable_out_channel": 24, "nemo_conv_channels": 8},
}
IMAGE: Values = {"boi_token_index": 1, "eoi_token_index": 2, "image_token_index": 3}
BLT_PART: Values = {key: SMALL[key] for key in SMALL if key not in TOKENS}

# By model type.
KINDS: dict[str, Values] = {
    # Gate, up and down. Falcon H1 multiplies the gate and the output.
    **alike(COMMON, "llama", "mistral", "ministral", "ministral3", "qwen2", "qwen3", "smollm3", "seed_oss", "cwm"),
    **alike(COMMON, "gemma", "gemma2", "gemma3_text", "vaultgemma", "olmo", "olmo2", "olmo3", "granite", "granite_swa"),
    **alike(COMMON, "cohere", "cohere2", "helium", "exaone", "exaone4", "ernie4_5", "hunyuan_v1_dense", "hyperclovax"),
    **alike(COMMON, "internlm3", "iquestcoder", "lfm3", "dory", "diffllama", "doge", "hrm_text", "bitnet"),
    "cohere_compass_text": merged(
        COMMON, rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    ),
    "stablelm": GROUPED,
    "minicpm3": LATENT,
    # With a pad token, loading zeroes its row in the embedding, and in the tied head.
    "youtu": merged(LATENT, pad_token_id=None),
    "lfm2": merged(GROUPED, CONV_FULL, block_auto_adjust_ff_dim=False),
    "gemma3n_text": merged(COMMON, PER_LAYER, SLIDING_FULL, laurel_rank=4),
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4_DENSE,
    "qwen3_5_text": merged(COMMON, DELTA, LINEAR_FULL),
    "olmo_hybrid": merged(GROUPED, DELTA, LINEAR_FULL),
    # Its config gives twice the slots.
    "recurrent_gemma": merged(COMMON, num_hidden_layers=3, lru_width=32, intermediate_size=96),
    "bamba": merged(GROUPED, MAMBA2, attn_layer_indices=[1]),
    "falcon_h1": merged(COMMON, MAMBA2, mamba_d_ssm=64, mlp_multipliers=[0.5, 2.0]),
    # The cache of its heads fits no smaller hidden size than 128.
    "xlstm": merged(SMALL, hidden_size=128, num_heads=4, ffn_proj_factor=0.375, ffn_round_up_to_multiple_of=8),
    "zamba": merged(SMALL, LINEAR_HYBRID, MAMBA, num_key_value_heads=4),
    "cpmant": merged(SMALL, dim_head=8, dim_ff=48),
    # Gate and up in one matrix. Zamba2's layers share one network, to which each adds an adapter.
    **alike(COMMON, "glm", "glm4", "modernbert-decoder"),
    "phi3": GROUPED,
    "moshi": merged(COMMON, ffn_dim=96),
    "zamba2": merged(SMALL, LINEAR_HYBRID, num_key_value_heads=4, adapter_rank=8, chunk_size=8, mamba_d_state=8),
    # One matrix in, one out
    **alike(COMMON, "apertus", "apertus1p5_text", "arcee", "nemotron", "jais2", "nanochat"),
    **alike(GROUPED, "starcoder2", "phi", "persimmon"),
    **alike(SMALL, "gpt_neox", "biogpt", "rwkv"),
    "falcon": merged(SMALL, ffn_hidden_size=48),
    "opt": merged(SMALL, ffn_dim=48, word_embed_proj_dim=32),
    "gpt_bigcode": merged(GPT, n_inner=48),
    **alike(merged(GPT, n_inner=48, rotary_dim=4), "gptj", "codegen"),
    "gpt_neo": merged(SMALL, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]),
    "ctrl": merged(GPT, dff=48),
    "xlnet": merged(TOKENS, d_model=32, n_layer=2, n_head=4, d_head=8, d_inner=48),
    "xglm": merged(BART, LOW_TOKENS, num_layers=2, attention_heads=4, ffn_dim=48),
    "reformer": merged(
        merged(BERT, feed_forward_size=48, attention_head_size=8, attn_layers=["local", "lsh"]),
        merged(axial_pos_shape=[8, 16], axial_pos_embds_dim=[8, 24], hash_seed=0, num_buckets=4),
    ),
    # 96 slots, or always four times the hidden size
    "gpt_neox_japanese": merged(SMALL, intermediate_multiple_size=3),
    "bloom": merged(TOKENS, hidden_size=32, n_layer=2, n_head=4),
    "mpt": merged(TOKENS, d_model=32, n_heads=4, n_layers=2, max_seq_len=128),
    "xlm": merged(TOKENS, emb_dim=32, n_layers=2, n_heads=4, max_position_embeddings=128, causal=True),
    # Conv1D, which stores its matrix the other way round
    **alike(merged(GPT, n_inner=48), "gpt2", "gpt-sw3"),
    # Always four times the hidden size
    "openai-gpt": GPT,
    # Decoders of encoder-decoder models
    **alike(BART, "bart", "mbart", "pegasus", "blenderbot", "blenderbot-small", "plbart", "mvp", "trocr"),
    "bigbird_pegasus": merged(BART, attention_type="original_full"),
    "marian": merged(BART, decoder_vocab_size=260, decoder_start_token_id=258),
    "whisper": merged(BART, max_target_positions=128, max_source_positions=16, begin_suppress_tokens=None),
    "prophetnet": merged(
        merged(TOKENS, hidden_size=32, encoder_ffn_dim=48, decoder_ffn_dim=48, is_decoder=True),
        {f"num_{side}_layers": 2 for side in ("encoder", "decoder")},
        {f"num_{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    ),
    # The first matrix in one module, the second in another
    **alike(BERT, "bert", "ernie", "megatron-bert", "bert-generation"),
    "git": merged(BERT, vision_config=VISION),
    **alike(ROBERTA, "roberta", "roberta-prelayernorm", "camembert", "data2vec-text", "xlm-roberta", "xlm-roberta-xl"),
    **alike(merged(BERT, embedding_size=20), "electra", "roformer"),
    "big_bird": merged(BERT, attention_type="original_full"),
    "rembert": merged(BERT, input_embedding_size=20, output_embedding_size=20),
    "roc_bert": merged(
        merged(BERT, pronunciation_vocab_size=260, pronunciation_embed_dim=12),
        merged(shape_vocab_size=260, shape_embed_dim=12),
    ),
    "xmod": merged(ROBERTA, default_language="en_XX"),
    # Experts, and in some also shared experts and dense layers
    **alike(merged(MIXED, LOCAL), "mixtral", "phimoe", "gpt_oss", "granitemoe", "minimax", "minimax_m2", "flex_olmo"),
    "olmoe": merged(MIXED, LOCAL, num_attention_heads=5, num_key_value_heads=5),
    "jetmoe": merged(MIXED, LOCAL, kv_channels=8),
    **alike(merged(MIXED, LOCAL, shared_intermediate_size=24), "granitemoeshared", "granitemoe_swa"),
    "granitemoehybrid": merged(MIXED, LOCAL, MAMBA2, LINEAR_FULL, mamba_n_heads=10, shared_intermediate_size=24),
    "kolibri1": merged(MIXED, LOCAL, SHARED, moe_intermediate_size=16),
    "cohere2_moe": merged(
        MIXED, LOCAL, DENSE_SPARSE, num_experts=4, num_shared_experts=2, prefix_dense_intermediate_size=48
    ),
    "minimax_m3_vl_text": merged(MIXED, LOCAL, DENSE_SPARSE, dense_intermediate_size=48, shared_intermediate_size=24),
    # Their shared experts are as wide as one expert.
    "llama4_text": merged(MIXED, LOCAL, intermediate_size_mlp=48, moe_layers=[1]),
    "hunyuan_v1_moe": merged(MIXED, intermediate_size=16, num_experts=4, moe_topk=2),
    # Twice an expert's again
    "aria_text": merged(MIXED, intermediate_size=16, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=2),
    "ernie4_5_moe": merged(
        merged(MIXED, moe_intermediate_size=16, moe_num_experts=4, moe_k=2),
        merged(moe_num_shared_experts=2, moe_layer_end_index=1),
    ),
    "mellum": merged(MIXED, LOCAL, DENSE_SPARSE, intermediate_size=48, moe_intermediate_size=16),
    "beam": merged(MIXED, EXPERTS, DENSE_SPARSE, SLIDING_FULL, GROUPS),
    "afmoe": merged(MIXED, EXPERTS, num_dense_layers=1, num_shared_experts=2),
    **alike(merged(MIXED, EXPERTS, DENSE_SPARSE, num_shared_experts=2), "exaone_moe", "hy_v3"),
    "lfm2_moe": merged(MIXED, EXPERTS, CONV_FULL, num_dense_layers=1),
    "zaya": merged(MIXED, EXPERTS, num_experts_per_tok=1, router_hidden_size=12),
    # Its experts are as wide as its dense layers.
    "jamba": merged(MIXED, MAMBA, mamba_dt_rank=4, num_experts=4, attn_layer_period=2, attn_layer_offset=1),
    "laguna": merged(MIXED, EXPERTS, SHARED, DENSE_SPARSE, num_attention_heads_per_layer=[4, 4]),
    "qwen3_moe": merged(MIXED, LOCAL, intermediate_size=48, moe_intermediate_size=16, mlp_only_layers=[0]),
    **alike(merged(MIXED, EXPERTS, SHARED, mlp_only_layers=[0]), "qwen2_moe", "flint"),
    "qwen3_next": merged(QWEN_NEXT, mlp_only_layers=[0]),
    "qwen3_5_moe_text": QWEN_NEXT,
    "qwen4_exp_text": merged(QWEN_NEXT, INDEXER, hc_lowrank=8),
    "lara_mini": merged(QWEN_NEXT, layer_types=["linear_attention", "sliding_attention"]),
    **alike(merged(MIXED, ROUTED, first_k_dense_replace=1), "glm4_moe", "sarvam_moe", "dots1"),
    "solar_open": merged(MIXED, ROUTED),
    "mimo_v2_flash": merged(MIXED, ROUTED, DENSE_SPARSE, v_head_dim=8),
    "deepseek_v2": merged(LATENT_MIXED, first_k_dense_replace=1),
    "deepseek_v3": merged(LATENT_MIXED, GROUPS, first_k_dense_replace=1),
    "sarvam_mla": merged(LATENT_MIXED, GROUPS, first_k_dense_replace=1, q_lora_rank=None),
    **alike(merged(LATENT_MIXED, GROUPS, DENSE_SPARSE), "axk1", "glm4_moe_lite"),
    **alike(merged(LATENT_MIXED, GROUPS, DENSE_SPARSE, INDEX), "deepseek_v32", "glm_moe_dsa"),
    "axk2": merged(LATENT_MIXED, DENSE_SPARSE, INDEX, gated_norm_rank=4),
    "hy_v4": merged(LATENT_MIXED, DENSE_SPARSE, INDEX, head_dim=8),
    "dots3_note_text": merged(LATENT_MIXED, DENSE_SPARSE, INDEX, head_dim=8, shared_experts_intermediate_size=12),
    # Its shared experts are as wide as one expert.
    "deepseek_v4": merged(
        MIXED, ROUTED, INDEX, intermediate_size=16, num_key_value_heads=1, q_lora_rank=12, o_groups=2, o_lora_rank=8
    ),
    **alike(merged(LATENT_MIXED, KIMI, DENSE_SPARSE, LINEAR_FULL), "kimi_linear", "bailing_hybrid"),
    "longcat_flash": merged(
        merged(LATENT_MIXED, head_dim=4, num_layers=2, moe_topk=2, zero_expert_num=1),
        merged(ffn_hidden_size=48, expert_ffn_hidden_size=16),
    ),
    "inkling_text": merged(MIXED, ROUTED, DENSE_SPARSE, INKLING),
    **alike(merged(MIXED, ROUTED, INKLING, intermediate_size=16), "inkling2_text", "inkling2_loop_text"),
    "nemotron_h": merged(MIXED, ROUTED, NEMOTRON_H),
    "dbrx": merged(
        merged(TOKENS, d_model=40, n_heads=4, n_layers=2, max_seq_len=128),
        merged(attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}),
        merged(ffn_config={"hidden_size": 40, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2}),
    ),
    # Configs within a config. The classes of the last four take only the text part.
    "gemma3": merged(IMAGE, text_config=COMMON, vision_config=VISION, mm_tokens_per_image=4),
    "gemma4": {"text_config": GEMMA4_MIXED},
    "gemma4_unified": {"text_config": GEMMA4_DENSE},
    "got_ocr2": merged(
        text_config=COMMON, vision_config=merged(VISION, mlp_dim=40, output_channels=8), image_token_index=3
    ),
    "moss_transcribe_diarize": merged(
        text_config=COMMON, audio_config=merged(TOWER, num_mel_bins=8, max_source_positions=16), audio_token_id=3
    ),
    "fuyu": merged(TOKENS, text_config=COMMON, patch_size=2, image_token_id=3),
    "phi4_multimodal": merged(GROUPED, vision_config=merged(VISION, crop_size=16), audio_config=PHI4_AUDIO),
    "blt": merged(
        # The last is no field of its config, but asked for by generation.
        merged(TOKENS, encoder_hash_byte_group_vocab=64, encoder_hash_byte_group_size=[3, 4], num_hidden_layers=2),
        {f"{part}_config": merged(BLT_PART, hidden_size_global=32) for part in ("encoder", "decoder")},
        {f"{part}_config": BLT_PART for part in ("patcher", "global")},
    ),
    "llama4": {"text_config": merged(MIXED, LOCAL, intermediate_size_mlp=48, moe_layers=[1])},
    "qwen3_5": {"text_config": merged(COMMON, DELTA, LINEAR_FULL)},
    "qwen3_5_moe": {"text_config": QWEN_NEXT},
    "qwen4_exp": {"text_config": merged(QWEN_NEXT, INDEXER, hc_lowrank=8)},
}
# Other options of the same types: name to type and values.
VARIANTS: dict[str, tuple[str, Values]] = {
    "llama-bias": ("llama", merged(COMMON, mlp_bias=True, tie_word_embeddings=True)),
    "lfm2-adjusted": ("lfm2", merged(GROUPED, CONV_FULL, intermediate_size=72, block_multiple_of=8)),
    "stablelm-parallel": ("stablelm", merged(GROUPED, use_parallel_residual=True)),
    "gpt_neox-serial": ("gpt_neox", merged(SMALL, use_parallel_residual=False)),
    "falcon-serial": (
        "falcon",
        merged(SMALL, ffn_hidden_size=48, parallel_attn=False, multi_query=False, alibi=True, bias=True),
    ),
    "falcon-new": (
        "falcon",
        merged(SMALL, ffn_hidden_size=48, new_decoder_architecture=True, num_kv_heads=2),
    ),
    "opt-post": ("opt", merged(SMALL, ffn_dim=48, word_embed_proj_dim=20, do_layer_norm_before=False)),
    "gpt2-default": ("gpt2", GPT),
    "gemma3n-sparse": (
        "gemma3n_text",
        merged(COMMON, PER_LAYER, SLIDING_FULL, laurel_rank=4, activation_sparsity_pattern=[0.5, 0.0]),
    ),
    # The layers that reuse keys and values of others have twice the slots.
    "gemma4-double": (
        "gemma4_text",
        merged(GEMMA4, layer_types=["full_attention"] * 2, num_kv_shared_layers=1, use_double_wide_mlp=True),
    ),
    "gemma4-experts": ("gemma4_text", GEMMA4_MIXED),
    "doge-experts": ("doge", merged(MIXED, is_moe=True, num_experts=16, num_experts_per_tok=2)),
    "granitemoehybrid-dense": (
        "granitemoehybrid",
        merged(COMMON, MAMBA2, LINEAR_FULL, shared_intermediate_size=48, num_local_experts=0),
    ),
    "nemotron_h-latent": ("nemotron_h", merged(MIXED, ROUTED, NEMOTRON_H, moe_latent_size=20)),
    "zamba2-two": (
        "zamba2",
        merged(KINDS["zamba2"], num_mem_blocks=2, use_shared_attention_adapter=True, use_mem_rope=True),
    ),
}
# Name to model type and config values.
FAMILIES: dict[str, tuple[str, Values]] = {kind: (kind, values) for kind, values in KINDS.items()} | VARIANTS


def family_config(name: str) -> Any:
    """The config of one of FAMILIES."""
    kind, values = FAMILIES[name]
    return AutoConfig.for_model(kind, **copy.deepcopy(values))
