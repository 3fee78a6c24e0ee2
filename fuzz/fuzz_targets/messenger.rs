#![no_main]

forebay_fuzz::targets! {
    "msgr2_auth" => forebay_messenger::fuzz::auth,
    "msgr2_banner" => forebay_messenger::fuzz::banner,
    "msgr2_frames" => forebay_messenger::fuzz::frames,
    "msgr2_ident" => forebay_messenger::fuzz::ident,
    "msgr2_place" => forebay_messenger::fuzz::place,
}
