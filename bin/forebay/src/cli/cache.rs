//! Commands on the read cache.

use clap::Subcommand;

/// Commands on the read cache.
#[derive(Debug, Subcommand)]
pub enum CacheCommand {
    /// Show how full the read cache is, and how many reads of clones and of own blocks it has answered
    #[command(after_help = "Examples:\n  forebay cache status\n  forebay cache status --format json")]
    Status,

    /// Empty the read cache, in memory and on disk; a disk that was turned off after errors is used again
    #[command(after_help = "Example:\n  forebay cache clear")]
    Clear,
}
