# Completion of nanomegatron and its programs, written by `nanomegatron completion bash` (or zsh).
# For `python train.py` as well, in place of python's own: complete -o default -F _nanomegatron python

_nanomegatron() {
    local word="${COMP_WORDS[COMP_CWORD]}" verb="" flag="" words="" i
    for ((i = 0; i < COMP_CWORD; i++)); do
        case "$verb ${COMP_WORDS[i]##*/}" in
            " nanomegatron") verb=VERB ;;
            " train.py" | " preprocess.py" | " convert.py")
                verb="${COMP_WORDS[i]##*/}"
                verb="${verb%.py}"
                ;;
            "VERB "*) verb="${COMP_WORDS[i]}" ;;
            ?*" --"*) flag="${COMP_WORDS[i]}" ;;
        esac
    done
    [[ "$word" == "=" ]] && word="" # bash cuts --flag=value into three
    case "$verb" in
        "") return ;;
        VERB) flag="" ;;
    esac
    [[ "$word" == -* ]] && flag=FLAGS
    case "$verb $flag" in
@CASES@
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    if [[ "$flag" == --config ]]; then
        COMPREPLY+=($(compgen -f -- "$word"))
    fi
}

complete -o default -F _nanomegatron nanomegatron train.py preprocess.py convert.py torchrun
