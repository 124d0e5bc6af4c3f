//! The whole token-exact comparison, as a Markdown table on stdout: `... --example token_exact -- [prompts] [portable prompts] [prompts over three
//! nodes]`.

#![forbid(unsafe_code)]

use anyhow::{Context, Result, ensure};
use integration_tests::configurations::{MANY, PAIRWISE, PORTABLE};
use integration_tests::token_exact::{Prompts, report};

#[tokio::main]
async fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let prompts: usize = args.next().map_or(Ok(200), |a| a.parse()).context("prompts")?;
    let portable: usize = args.next().map_or(Ok(20), |a| a.parse()).context("portable prompts")?;
    let many: usize = args
        .next()
        .map_or(Ok(20), |a| a.parse())
        .context("prompts over three nodes")?;
    let of = |count| Prompts {
        count,
        tokens_max: 2_000,
    };
    println!("{}", report::HEADER);
    let mut rows = report::run(&PAIRWISE, of(prompts)).await?;
    rows.extend(report::run(&[PAIRWISE[0], PORTABLE], of(portable)).await?.split_off(1));
    let over_three: Vec<_> = [PAIRWISE[0]].into_iter().chain(MANY).collect();
    rows.extend(report::run(&over_three, of(many)).await?.split_off(1));
    ensure!(
        rows.iter().all(report::Row::is_good),
        "a row differs, or did not hand over every request"
    );
    Ok(())
}
