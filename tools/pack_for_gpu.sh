#!/usr/bin/env bash
# Packs Libra and vLLM for CUDA for a machine with a GPU that reaches no package index.
#
#     tools/pack_for_gpu.sh FOLDER     makes FOLDER/part1, part2, ..., each below 56 MiB; needs pip, xz and unzip
#     sh PART/unpack.sh [SITE]         there, once for each part; SITE is ~/site where it is left out
#
# The other machine has Python 3.12, PyTorch 2.11 for CUDA 13, transformers and accelerate. vLLM 0.26.0 is the newest that
# is built for that PyTorch. It is packed without kernels that dense and MoE models need on no Hopper GPU. Models come
# along as their shapes: the benchmark makes their weights.
set -euo pipefail
vllm=0.26.0 python=3.12 most=$((55 << 20))
out=$(mkdir -p "$1" && cd "$1" && pwd)
root=$(cd "$(dirname "$0")/.." && pwd)
all=$(mktemp -d)
trap 'rm -rf "$all"' EXIT
mkdir "$all/files" "$all/vllm"

platforms=()
for glibc in 2_39 2_34 2_31 2_28 2_27 2_26 2_24 2_17 2_12 2_5; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
for name in manylinux2014_x86_64 manylinux1_x86_64 any; do platforms+=(--platform "$name"); done
get() {
    "${PYTHON:-python3}" -m pip download -q --no-deps --only-binary=:all: --python-version "$python" --implementation cp \
        "${platforms[@]}" -d "$@"
}
get "$all/files" -r "$root/tools/gpu_wheels.txt"
get "$all" "vllm==$vllm"
cd "$all/vllm"
unzip -q "$all"/vllm-*.whl -x '*_vllm_fa2_C*' vllm/vllm-rs 'vllm/third_party/fmha_sm100/*' 'vllm/third_party/deep_gemm/*' \
    'vllm/third_party/flashmla/*' 'vllm/_qutlass*' 'vllm/entrypoints/serve/instrumentator/static/*'
# Large libraries by themselves, their paths with % for /: a part holds no more than one or two.
find . -name '*.so' -size +20M -printf '%P\n' | while read -r library; do
    xz -T0 -3 -c "$library" > "$all/files/${library//\//%}.xz"
    rm "$library"
done
tar cf - . | xz -T0 -6 > "$all/files/vllm.tar.xz"
git -C "$root" archive HEAD | xz -T0 -6 > "$all/files/project.tar.xz"

cat > "$all/unpack.sh" << 'END'
#!/bin/sh
# Puts one part into SITE (default ~/site): sh PART/unpack.sh [SITE]
set -eu
site=${1:-$HOME/site}
mkdir -p "$site/project" && site=$(cd "$site" && pwd)
cd "$(dirname "$0")"
for file in *.whl *.xz; do
    case $file in
        '*.whl' | '*.xz') ;;
        *.whl) python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "./$file" ;;
        project.tar.xz) tar xJf "$file" -C "$site/project" ;;
        *.tar.xz) tar xJf "$file" -C "$site" ;;
        *)
            target=$site/$(basename "$file" .xz | tr % /)
            mkdir -p "$(dirname "$target")" && xz -dc "$file" > "$target"
            ;;
    esac
done
echo "With all parts unpacked:"
echo "cd $site/project && PYTHONPATH=src:$site VLLM_USE_FLASHINFER_SAMPLER=0 python3 -m benchmarks.gpu --json rows.jsonl"
END

# The largest first, each into the first part that has room.
sizes=()
find "$all/files" -type f -printf '%s %p\n' | sort -rn > "$all/sizes"
while read -r size file; do
    if ((size > most)); then echo "pack_for_gpu: ${file##*/} has $size bytes, more than a part of $most" >&2 && exit 1; fi
    number=0
    while ((${sizes[number]:-0} + size > most)); do number=$((number + 1)); done
    sizes[number]=$((${sizes[number]:-0} + size))
    mkdir -p "$out/part$((number + 1))"
    mv "$file" "$out/part$((number + 1))/"
done < "$all/sizes"
for part in "$out"/part*; do cp "$all/unpack.sh" "$part/"; done
du -sm "$out"/part*
