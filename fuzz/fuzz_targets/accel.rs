#![no_main]

mod tiers;

forebay_fuzz::targets! {
    "accel_expand" => forebay_accel::compress::fuzz::expand,
    "accel_round_trip" => forebay_accel::compress::fuzz::round_trip,
    "accel_tiers" => tiers::run,
}
