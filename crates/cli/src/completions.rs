//! `baton completions SHELL`: a completion script on stdout. Names of a running cluster are asked for while a line is typed.

pub mod live;

use anyhow::Context as _;
use clap::{Args, Command};
use clap_complete::Shell;

use crate::exit::Exit;

/// Asks for live names first. They are letters, digits, dots, dashes and underscores only, so that no shell expands them.
const LIVE_BASH: &str = r#"
# Names of nodes, requests and processes come from the running cluster.
_baton_live() {
    local names
    names=$("$1" complete-live "${COMP_LINE:0:COMP_POINT}" 2>/dev/null)
    if [[ -n $names ]]; then
        local IFS=$'\n'
        COMPREPLY=($names)
    else
        _baton "$@"
    fi
}
complete -F _baton_live -o bashdefault -o default baton
"#;

const LIVE_ZSH: &str = r#"# Names of nodes, requests and processes come from the running cluster.
_baton() {
    local -a names
    names=(${(f)"$($words[1] complete-live "${(j: :)words[1,CURRENT]}" 2>/dev/null)"})
    if (( $#names )); then
        compadd -a names
    else
        _baton_static "$@"
    fi
}

"#;
/// In the script of clap for zsh: the function that completes, and what follows on all functions.
const ZSH_FUNCTION: &str = "\n_baton() {";
const ZSH_END: &str = "if [ \"$funcstack[1]\" = \"_baton\" ]";

const LIVE_FISH: &str = r#"
# Names of nodes, requests and processes come from the running cluster.
complete -c baton -n "__fish_seen_subcommand_from drain role trace logs" -f -a "(baton complete-live (commandline -cp) 2>/dev/null)"
complete -c baton -n "__fish_seen_subcommand_from tap" -l node -x -a "(baton complete-live (commandline -cp) 2>/dev/null)"
"#;

#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell to write for. In bash, zsh and fish, names of nodes, requests and processes are completed, too.
    pub shell: Shell,
}

/// `command` is the whole command line of `baton`.
pub fn run(args: &CompletionsArgs, command: Command) -> anyhow::Result<Exit> {
    crate::stdout::print_result(&script(args.shell, command)?)?;
    Ok(Exit::Ok)
}

/// # Errors
/// The script of clap is not as expected, which a test finds.
fn script(shell: Shell, mut command: Command) -> anyhow::Result<String> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, "baton", &mut script);
    let script = String::from_utf8(script).context("clap wrote a script that is not text")?;
    Ok(match shell {
        Shell::Bash => script + LIVE_BASH,
        Shell::Fish => script + LIVE_FISH,
        Shell::Zsh => {
            let parts = script.split_once(ZSH_FUNCTION).zip(script.rsplit_once(ZSH_END));
            let ((before, _), (_, after)) = parts.context("clap wrote a script for zsh that is not as expected")?;
            let function = &script[before.len() + ZSH_FUNCTION.len()..script.len() - after.len() - ZSH_END.len()];
            format!("{before}\n_baton_static() {{{function}{LIVE_ZSH}{ZSH_END}{after}")
        }
        _ => script,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use clap::CommandFactory;

    #[test]
    fn every_shell_gets_a_script_that_names_the_binary_and_asks_for_live_names() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = script(shell, Cli::command()).expect("a script");
            for word in [
                "baton",
                "completions",
                "trace",
                "tap",
                "top",
                "status",
                "nodes",
                "slowest",
                "slower-than-ms",
                "complete-live",
            ] {
                assert!(script.contains(word), "{word} for {shell}");
            }
        }
    }

    #[test]
    fn zsh_asks_for_live_names_before_its_own_and_keeps_the_rest_of_the_script() {
        let zsh = script(Shell::Zsh, Cli::command()).expect("a script");
        for once in [
            "\n_baton() {",
            "\n_baton_static() {",
            "    compdef _baton baton\n",
            "#compdef baton\n",
        ] {
            assert_eq!(zsh.matches(once).count(), 1, "{once}");
        }
        assert!(zsh.find("_baton_static() {") < zsh.find("\n_baton() {"));
        assert!(zsh.find("\n_baton() {") < zsh.find(ZSH_END));
    }

    /// What bash offers for a line whose live names are `live`.
    fn offered(line: &str, live: &str) -> String {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("completion");
        std::fs::write(&path, script(Shell::Bash, Cli::command()).expect("a script")).expect("written");
        let asks = r#"
            baton() { [[ $1 == complete-live && $2 == "$COMP_LINE" ]] && printf '%s' "$LIVE"; }
            source "$SCRIPT"
            COMP_LINE=$LINE COMP_POINT=${#LINE} COMP_WORDS=($LINE)
            COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
            _baton_live baton "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
            printf '%s ' "${COMPREPLY[@]}"
        "#;
        let shell = std::process::Command::new("bash")
            .args(["--norc", "-c", asks])
            .envs([("LINE", line), ("LIVE", live)])
            .env("SCRIPT", &path)
            .output()
            .expect("bash");
        String::from_utf8(shell.stdout).expect("text")
    }

    #[test]
    fn bash_offers_live_names_and_else_its_own() {
        assert_eq!(offered("baton drain d", "decode-0\ndecode-1"), "decode-0 decode-1 ");
        let own = offered("baton com", "");
        assert!(
            own.contains("compare ") && own.contains("completions ") && !own.contains("drain"),
            "{own}"
        );
    }
}
