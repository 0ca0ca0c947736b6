"""Digests of what was reviewed in vLLM 0.26.0, 0.27.0 and so on to 0.33.0, by module and name.

``python -m scripts.check_patch_points vllm==VERSION`` prints those of another version; read the source
before you add one.

"" stands for what a version does not have.
"""

REVIEWED: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm.v1.sample.sampler": {
        "Sampler.forward": ("8d225b00a6ee0f27", "1cc0fe8085b49260"),
        "Sampler.sample": ("f5ca1f6282f62cc9", "21001da86f51f2cd"),
        "Sampler.apply_temperature": ("819b96c33b68836c",),
        "Sampler.greedy_sample": ("45f04dc009edfd4d", "3471018c24bb6d4a"),
        "Sampler.compute_logprobs": ("ba488455236aaa75",),
        "Sampler.apply_logits_processors": ("da75ceae9754359c",),
        "Sampler.apply_penalties": ("36b1a50a6288ad2d",),
    },
    "vllm.v1.sample.rejection_sampler": {"RejectionSampler.parse_output": ("0460b953fad642f5", "dfb27be0216d56d4")},
    "vllm.v1.worker.gpu.input_batch": {
        "get_num_sampled_and_rejected": ("8782d5374a54ad87",),
        "_get_num_sampled_and_rejected_kernel": ("ac236f93ce119cd9",),
    },
    "vllm.v1.sample.ops.topk_topp_sampler": {
        "TopKTopPSampler.__init__": (
            "eceafeb998f3514f",
            "2178914aea9fc524",
            "335fb3f0fbf776fd",
            "f5416cc70f96cff1",
            "0ff4128873ad76e1",
        ),
        "TopKTopPSampler.forward_native": ("50d81a54b5b37291", "a11f69cb6b7470a4"),
        # The last one, of 0.26 to 0.28, forgets seeds: sampling.py puts forward_native in its place.
        "TopKTopPSampler.forward_cpu": (
            "a38dae1da81e2db7",
            "9436e452adf9e7ef",
            "7ae494a965ae2083",
            "3ddd3bf7bc1a35c4",
        ),
        "empty_exponential_noise_like": ("32c6e0958267a08d",),
        "sample_with_exponential_noise": ("0594dd39712a672d",),
        "random_sample": ("35cb75baf4d524a7",),
    },
    "vllm.v1.sample.ops.penalties": {
        "apply_all_penalties": ("f9bdbbb3a576c0f5", "b0eae8c493eb4ba7"),
        "_convert_to_tensors": ("33abc13f2df5b71b", "d2b4fe84835fef80"),
    },
    "vllm.v1.sample.ops.bad_words": {
        "_SMALLEST_LOGIT": ("79e8f747684bc08d",),
        "apply_bad_words": ("fa9b1f015093cab7",),
        "_apply_bad_words_single_batch": ("d444138cbfbca53a",),
    },
    "vllm.v1.sample.logits_processor.builtin": {
        "MinPLogitsProcessor.apply": ("e8331db7419cbbf6",),
        "LogitBiasLogitsProcessor.apply": ("28d679f9ce828d3a",),
        "MinTokensLogitsProcessor.apply": ("2683b19309bf798b", "bc85c20c6f5dd2cd"),
        "MinTokensLogitsProcessor._mask_stop_token_logits": ("", "8f63a4392ed55885"),
        "MinTokensLogitsProcessor.apply_with_spec_decode": ("380757e409e07c20", "74c1c8058352e4e9"),
    },
    "vllm.model_executor.layers.utils": {
        "get_token_bin_counts_and_mask": ("43dc200f576d3d81",),
        "apply_penalties": ("9d4bc7f46cdb35b1", "a7b2e6ae8fd7cb01"),
    },
    "vllm._custom_ops": {
        "apply_repetition_penalties": ("469e727c597fb878", "af4bcb8f1f0e4f41"),
        "apply_repetition_penalties_torch": ("7c6ba3f43b4213cc",),
        "apply_repetition_penalties_cuda": ("25876cc6b966c8d4",),
    },
    "vllm.v1.worker.gpu.sample.sampler": {
        "Sampler.__call__": (
            "b0e5b934a5cd22b6",
            "3816572f2bf4e97a",
            "bae4ecb766b14e86",
            "6561b18fc970072d",
            "19074a3964b4c36a",
            "00c4e8034bee6458",
            "290a351355524a19",
        ),
        "Sampler.returns_logprobs": ("", "59bfa6cba7f5cabd"),
        "Sampler.get_logprobs_dims": ("", "a4df6ad00413aa2f"),
        "Sampler._requires_logits_processing": ("", "dbd9247308ddf28b"),
        "Sampler.apply_sampling_params": (
            "7366a3c554203d28",
            "00610389c9828466",
            "b2af8fb3cbd6b02c",
            "da3036b9f32e1a05",
        ),
        "Sampler.sample": (
            "b79486bb5f6e5878",
            "e2212bc5147aa29e",
            "d5e45297427a6c83",
            "334ff6a41227c91b",
            "808248092d0ed5e3",
            "5b8675255bd444b7",
            "62f023c13cd15427",
        ),
        "Sampler._sample_random": ("", "015a7c3e7037436e", "326409932cb37002", "6ddb95e1ba45f35b"),
    },
    "vllm.v1.worker.gpu.sample.states": {
        "SamplingStates.add_request": ("f091f5742015eb0f", "ee0f73b7845ab635"),
        "SamplingStates.apply_temperature": ("8182128a15189f56",),
        "SamplingStates.apply_min_p": ("23a7363247153f91",),
        "SamplingStates.get_top_k_top_p": ("7c5ecc45aa40686d", "74c1383cd7f7bf4c"),
        "SamplingStates.apply_top_k_top_p": ("758a353f77e91b43", "e48fa814d6938bb2"),
        "SamplingStates.max_num_logprobs": ("9259cc196828617f",),
    },
    "vllm.v1.worker.gpu.sample.gumbel": {
        "_TL_RAND_MIN": ("3f9d06439e178999", "036e93418ea5d60d"),
        "_temperature_kernel": ("d984ad19ae41ae4f",),
        "apply_temperature": ("44ffa60e94136427",),
        "tl_rand64": ("", "ba6b8207d79fad70"),
        "tl_rand32": ("14b2f278f24668f7",),
        "gumbel_block_argmax": (
            "50168ba62e90de56",
            "8f9901f610f79af5",
            "10430d16224e1faf",
            "0d50fc184f4d9e7a",
            "f8a4713870280cc5",
        ),
        "_gumbel_sample_kernel": ("7791cdc7b18b31b1", "9f55940fb674de76", "f76de52c0d2de230", "46235d2171344c9e"),
        "gumbel_sample": ("3d786076df7943ec", "4241076ff9301409", "5817c5e40af296c3", "4299122bdd99e088"),
        "gumbel_noised_argmax": ("", "28a85baa884574ea", "532da45396514a95", "ac802f8f5c51ecd9"),
        "_DRAFT_NOISE_SALT": ("", "e342a6f4791a1ed4", "6445efebc5ab7ef4"),
        "_murmur3_rotl32": ("", "06988a47672a2fc6"),
        "_murmur3_mix": ("", "45c3503783a5f74b"),
        "_murmur3_fmix32": ("", "d35488bc7d627a60"),
        "murmur3_hash32": ("", "947a6a293fd51f01"),
        "murmur3_uniform32": ("", "ccb387515997cc5d"),
        "_uniform64_from_random53": ("", "652db86dc936f614"),
        "murmur3_uniform64": ("", "2dc3615b04ed8e8c"),
        "_log1p_neg_stable": ("", "14ecf5a4c148909a"),
        "spec_step_seed": ("", "b2b471d3536f7ee5"),
    },
    "vllm.v1.worker.gpu.sample.min_p": {
        "_min_p_kernel": ("814314e863cd101d",),
        "apply_min_p": ("eea404553e370af0",),
    },
    "vllm.v1.worker.gpu.sample.penalties": {
        "PENALTIES_BLOCK_SIZE": ("", "9ef3cc1c1aa49080"),
        "PenaltiesState.apply_penalties": ("", "4ec4fe905322b068"),
        "PenaltiesState.apply": ("", "419fda3540d4bbbc"),
        "_penalties_kernel": ("9a54f43b0831627b",),
        "apply_penalties": ("1146689902bb4374", "306faf96e50d4a14"),
        "_bincount_kernel": ("99b747e28f44fbf9",),
        "bincount": ("c995d257e10095d9",),
        "use_penalty": ("ff3dc93dee445b03",),
    },
    "vllm.v1.worker.gpu.sample.bad_words": {
        "BadWordsState.apply_bad_words": ("", "745b0873c9ab43d3"),
        "BadWordsState.apply": ("", "6fec53b3c676f600"),
        "_bad_words_kernel": ("830fd4a2be885cbb", "010e3df0fca234a4"),
        "apply_bad_words": ("88716bca7f230e4f",),
    },
    "vllm.v1.worker.gpu.sample.logit_bias": {
        "LogitBiasState.apply_logit_bias": ("", "f8fb81e07cb82f7d", "fa0fa7d2e4d7119c"),
        "LogitBiasState.apply": ("", "976be2db6504afbe"),
        "_bias_kernel": ("888378c714284ae1", "7a1fa43dbeedd6a0", "1ac25f7bc8df0c92"),
        "apply_logit_bias": ("75e50ad1e857c9bc", "64234443ea35ba60"),
    },
    "vllm.v1.worker.gpu.sample.prompt_logprob": {
        "PromptLogprobsWorker.compute_prompt_logprobs": ("2e57d99996f0c022", "5d091b0566288b99"),
        "PromptLogprobsWorker.compute_prompt_token_id_logprobs": ("", "29770fd15b002d8a", "ab9fcd2ae3ecc62f"),
        "_prompt_logprobs_token_ids_kernel": ("99046cb37fd3c399",),
        "get_prompt_logprobs_token_ids": ("a39aecf5030df8fd",),
        "compute_prompt_logprobs_with_chunking": ("f3cf09923a07b46a", "b2fe8c4fa910a198"),
    },
    "vllm.v1.worker.gpu.structured_outputs": {
        "GRAMMAR_BITMASK_BLOCK_SIZE": ("", "915272869a979ffa"),
        "_apply_grammar_bitmask_kernel": ("5ce7ece71bba12b0", "c831e395217f2436"),
    },
}

REVIEWED_DECODERS: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm.model_executor.layers.fused_moe.routed_experts": {
        "RoutedExperts.forward_monolithic": ("464ae9eead9b6fd8",),
    },
    "vllm.model_executor.layers.fused_moe.runner.moe_runner": {
        "_moe_forward": ("1a6a5da14a53f247",),
        "_unpack": ("d12e129527c06b2d",),
        "MoERunner.forward": ("876f47275e134c8f",),
        "MoERunner._forward_impl": ("7ee2b3cdb54df8b9",),
        "MoERunner._apply_quant_method": ("84848e1494dfce3c", "becb8e88c4c402c8"),
        "MoERunner._maybe_combine": ("e7c2489065a43cb4",),
        "MoERunner._maybe_reduce_final_output": ("679f7487b1cc79b6",),
        "MoERunner._maybe_reduce_routed_output_before_transform": ("eb4329fdf7e16df5",),
        "MoERunner._maybe_apply_routed_scale_to_output": ("b35ce9d406d8cd05",),
        "MoERunner._maybe_add_zero_expert_output": ("3749ed1aec2f7e65",),
        "MoERunner.apply_routed_output_transform": ("6de51cc418916297",),
    },
    "vllm.model_executor.layers.linear": {
        "RowParallelLinear.forward": ("110cb650730bbdb3",),
    },
    "vllm.model_executor.models.interfaces": {
        "EagleModelMixin._maybe_add_hidden_state": ("e11f688d4ca91620",),
    },
    "vllm.model_executor.models.llama": {
        "LlamaMLP.forward": ("efe86783014c9e72",),
        "LlamaAttention.forward": ("a73d7f51e53bd6cc",),
        "LlamaDecoderLayer.forward": ("17f13fe6adeb2c41",),
        "LlamaModel.forward": ("2423d3cb0801cb4f",),
    },
    "vllm.model_executor.models.mistral": {
        "MistralAttention.forward": ("0136ad3a9366a73f",),
        "MistralDecoderLayer.forward": ("f44562a789b49f75",),
        "MistralModel.forward": ("9c8e59ffa717ef35",),
    },
    "vllm.model_executor.models.mixtral": {
        "MixtralMoE.forward": ("5c42de3a2d940b1d",),
        "MixtralAttention.forward": ("a73d7f51e53bd6cc",),
        "MixtralDecoderLayer.forward": ("166efae9caa2591e",),
        "MixtralModel.forward": ("8c7f24df8dd41774",),
    },
    "vllm.model_executor.models.qwen2": {
        "Qwen2MLP.forward": ("6336b9a612c749bd",),
        "Qwen2Attention.forward": ("05170190e9d35405",),
        "Qwen2DecoderLayer.forward": ("042c2fc18af98dc8",),
        "Qwen2Model.forward": ("78dd4f6386da27a9",),
    },
    "vllm.model_executor.models.qwen3": {
        "Qwen3Attention.forward": ("a2e99697a555b692",),
        "Qwen3DecoderLayer.forward": ("042c2fc18af98dc8",),
    },
    "vllm.model_executor.models.qwen3_moe": {
        "Qwen3MoeMLP.forward": ("705281959150e010",),
        "Qwen3MoeSparseMoeBlock.forward": ("d31e68fece57a6da",),
        "Qwen3MoeAttention.forward": ("3695dfaefdad0991",),
        "Qwen3MoeDecoderLayer.forward": ("042c2fc18af98dc8",),
        "Qwen3MoeModel.forward": ("1f5efd5aba20c905",),
    },
}
"""Of decoders whose sums and norms are one operation, in vLLM 0.32.0 and 0.33.0. With other sources they stay apart."""
