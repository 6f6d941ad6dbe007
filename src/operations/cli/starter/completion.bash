
# Bash splits words at "=". Join key=value, and complete only the part after the sign.
_operations_joined() {
  local -a _words=("${COMP_WORDS[@]:0:COMP_CWORD+1}") _joined=()
  local _word _start="" _glue=""
  for _word in "${_words[@]}"; do
    if [[ "$_word" == "=" && ${#_joined[@]} -gt 3 && "${_joined[-1]}" != -* && "${_joined[-1]}" != *=* ]]; then
      _joined[-1]+="="
      _glue=1
    elif [[ -n "$_glue" ]]; then
      _joined[-1]+="$_word"
      _glue=""
    else
      _joined+=("$_word")
    fi
  done
  [[ ${#_joined[@]} -lt ${#_words[@]} && "${_joined[-1]}" == *=* && "${_joined[-1]}" != -* ]] && _start="${_joined[-1]%%=*}="
  local -a COMP_WORDS=("${_joined[@]}")
  local COMP_CWORD=$((${#_joined[@]} - 1))
  _operations
  [[ -n "$_start" ]] && COMPREPLY=("${COMPREPLY[@]#"$_start"}")
  [[ ${#COMPREPLY[@]} -gt 0 && "${COMPREPLY[0]}" == *= ]] && compopt -o nospace 2>/dev/null
  return 0
}
complete -F _operations_joined operations
